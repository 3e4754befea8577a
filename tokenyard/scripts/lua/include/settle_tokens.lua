-- Correct the tokens that were reserved for a request of a tenant, `held`, now that it is over and has used
-- these. A bucket that has left the window stays as it is. A client may have written the field of the
-- ledger.
-- @include prefix_of
-- @include token_windows
local function settle_tokens(ledger, held, used)
  local MOST, MOST_BYTES = 1e12, 200
  if not held then return end
  redis.call('HDEL', ledger, 'reserved')
  if #held > MOST_BYTES then return end
  local reserved, ms, tenant = held:match('^(%d+) (%d+) ([%w_.:@-]+)$')
  if not reserved then return end
  local change = math.max(-MOST, math.min(MOST, used - tonumber(reserved)))
  local counts = prefix_of(ledger) .. 'tenant:' .. tenant
  for _, window in ipairs(token_windows()) do
    local bucket = math.floor(tonumber(ms) / window.width)
    local field = window.mark .. bucket % window.count
    local number, sum = (redis.call('HGET', counts, field) or ''):match('^(%d+) (%d+)$')
    if tonumber(number) == bucket then
      redis.call('HSET', counts, field,
        string.format('%.0f %.0f', bucket, math.max(0, tonumber(sum) + change)))
    end
  end
end
