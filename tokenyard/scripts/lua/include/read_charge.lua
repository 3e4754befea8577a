-- A charge by its text, `<amount> <per input token> <per output token> <tenant> <model>`; nil where that
-- is invalid, since a client may have written it into its ledger. No tenant is ''.
local function read_charge(text)
  local MOST, MOST_BYTES, MOST_TENANT = 1e12, 700, 90
  local function amount(digits)
    local number = digits:find('^[%de.+-]+$') and tonumber(digits)
    return number and number >= 0 and number <= MOST and number
  end
  if not text or #text > MOST_BYTES then return nil end
  local whole, input, output, tenant, model = text:match('^(%S+) (%S+) (%S+) ([%w_.:@-]*) (.*)$')
  if not whole or #tenant > MOST_TENANT then return nil end
  local charge = {amount = amount(whole), input = amount(input), output = amount(output),
    tenant = tenant, model = model, rates = input .. ' ' .. output .. ' ' .. tenant .. ' ' .. model}
  return charge.amount and charge.input and charge.output and charge
end
