-- Settle a request that is over, see `settle_charge` and `count_end`. One that waited has been given back
-- its charge, or never had one: then `intake` says whose it is.
-- @include count_end
-- @include prefix_of
-- @include settle_charge
-- @include settle_tokens
-- @include tenant_of
local function end_charge(ledger, status, used, intake, code)
  local charge = settle_charge(ledger, used.input, used.output, intake)
  if charge then
    settle_tokens(ledger, used.input + used.output)
    count_end(prefix_of(ledger), charge.tenant, charge.model, status, used, code)
  elseif intake then
    local prefix, _, tenant = tenant_of(intake)
    if not tenant then return end
    settle_tokens(ledger, used.input + used.output)
    count_end(prefix, tenant, '', status, used, code)
  end
end
