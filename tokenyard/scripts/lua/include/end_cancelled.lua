-- Settle a request that was cancelled while `worker` ran it from `entry` of its lane, in `tenant_sums`: by
-- the tokens that the engine has used, of which `used.input` is nil where that had not begun with it. The
-- estimate of its dispatch was charged until now; `cancel` has counted the tokens that were published.
-- Returns whether there was anything to settle.
-- @include settle_charge
-- @include settle_tokens
local function end_cancelled(sums, ledger, worker, entry, used)
  local MOST_DIGITS = 9
  local known = redis.call('HMGET', ledger, 'state', 'worker', 'entry', 'charge', 'reserved', 'used')
  if known[1] ~= 'cancelled' or known[2] ~= worker or known[3] ~= entry or not known[4] then
    return false
  end
  -- A client may have written the field.
  local estimate, published = (known[6] or ''):match('^(%d+) (%d+)$')
  local is_valid = estimate and #estimate <= MOST_DIGITS and #published <= MOST_DIGITS
  published = is_valid and tonumber(published) or 0
  local input = used.input or is_valid and tonumber(estimate) or 0
  local output = math.max(used.output, published)
  local charge = settle_charge(sums, ledger, known[4], input, output, true)
  settle_tokens(ledger, known[5], input + output)
  if charge then
    local counts = {['in'] = input, cached = used.cached, out = output - published}
    sums.use(charge.tenant, charge.model, counts)
  end
  redis.call('HSET', ledger, 'used', string.format('%.0f %.0f', input, output))
  return true
end
