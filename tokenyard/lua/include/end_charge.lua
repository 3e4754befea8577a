-- Settle a request that is over, see `settle_charge` and `count_end`. One that waited has been given back
-- its charge, or never had one: then `intake` says whose it is.
-- @include count_end
-- @include settle_charge
-- @include tenant_of
local function end_charge(ledger, status, used, intake)
  local charge = settle_charge(ledger, used.input, used.output, intake)
  if charge then
    count_end(ledger:match('^tokenyard:{[^}]*}:'), charge.tenant, charge.model, status, used)
  elseif intake then
    local prefix, _, tenant = tenant_of(intake)
    if tenant then count_end(prefix, tenant, '', status, used) end
  end
end
