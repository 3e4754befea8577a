-- Settle a request that is over, see `settle_charge` and `count_end`. One that waited has been given back
-- its charge, or never had one: then `intake` says whose it is. `sums` are `tenant_sums` that the caller
-- writes; otherwise they are written here.
-- @include count_end
-- @include prefix_of
-- @include settle_charge
-- @include settle_tokens
-- @include tenant_of
-- @include tenant_sums
local function end_charge(ledger, status, used, intake, sums)
  local known = redis.call('HMGET', ledger, 'charge', 'reserved')
  local all = sums or tenant_sums(prefix_of(ledger))
  local charge = settle_charge(all, ledger, known[1], used.input, used.output, intake)
  local _, _, tenant = tenant_of(intake or '')
  if charge or tenant then
    settle_tokens(ledger, known[2], used.input + used.output)
    count_end(all, charge and charge.tenant or tenant, charge and charge.model or '', status, used)
  end
  if not sums then all.write() end
end
