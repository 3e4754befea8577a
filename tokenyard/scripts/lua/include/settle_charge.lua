-- Settle what a running request was charged at its dispatch by the tokens that it has used, in and out.
-- Returns the charge; nil where there is none.
-- @include bill
-- @include keep_count
-- @include prefix_of
-- @include read_charge
local function settle_charge(ledger, input, output, waits)
  local text = redis.call('HMGET', ledger, 'charge')[1]
  if not text then return nil end
  redis.call('HDEL', ledger, 'charge')
  local charge, prefix = read_charge(text), prefix_of(ledger)
  if not charge then return nil end
  bill(prefix, charge.tenant, input * charge.input + output * charge.output - charge.amount)
  if charge.tenant ~= '' and not waits then
    keep_count(prefix .. 'tenant:' .. charge.tenant, 'running', -1)
  end
  return charge
end
