-- Settle what a running request was charged at its dispatch, `text`, by the tokens that it has used, in and
-- out, in `tenant_sums`. Returns the charge; nil where there is none.
-- @include read_charge
local function settle_charge(sums, ledger, text, input, output, waits)
  if not text then return nil end
  redis.call('HDEL', ledger, 'charge')
  local charge = read_charge(text)
  if not charge then return nil end
  sums.charge(charge.tenant, input * charge.input + output * charge.output - charge.amount)
  if charge.tenant ~= '' and not waits then sums.run(charge.tenant, -1) end
  return charge
end
