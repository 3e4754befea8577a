-- Give back what a request was charged at its dispatch, since it waits again: only its rates are kept.
-- @include prefix_of
-- @include settle_charge
-- @include tenant_sums
local function give_back(ledger)
  local sums = tenant_sums(prefix_of(ledger))
  local charge = settle_charge(sums, ledger, redis.call('HMGET', ledger, 'charge')[1], 0, 0)
  if charge then redis.call('HSET', ledger, 'charge', '0 ' .. charge.rates) end
  sums.write()
end
