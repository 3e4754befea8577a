-- Give back what a request was charged at its dispatch, since it waits again: only its rates are kept.
-- @include settle_charge
local function give_back(ledger)
  local charge = settle_charge(ledger, 0, 0)
  if charge then redis.call('HSET', ledger, 'charge', '0 ' .. charge.rates) end
end
