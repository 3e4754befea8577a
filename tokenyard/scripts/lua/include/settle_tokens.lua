-- Correct the tokens that were reserved for a request of a tenant, `held`, now that it is over and has used
-- these. Where its bucket has left the window, what was used more counts from now on. A client may have
-- written the field of the ledger.
-- @include prefix_of
-- @include server_ms
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
  local function read(window, bucket)
    local text = redis.call('HGET', counts, window.mark .. bucket % window.count)
    local number, sum = (text or ''):match('^(%d+) (%d+)$')
    return tonumber(number), tonumber(sum)
  end
  for _, window in ipairs(token_windows()) do
    local bucket, now = math.floor(tonumber(ms) / window.width), math.floor(server_ms() / window.width)
    local number, sum = read(window, bucket)
    local has_left = number and now - bucket >= window.count
    if has_left and change > 0 then
      bucket = now
      number, sum = read(window, bucket)
      if number ~= bucket then number, sum = bucket, 0 end
    end
    if number == bucket and (change > 0 or not has_left) then
      redis.call('HSET', counts, window.mark .. bucket % window.count,
        string.format('%.0f %.0f', bucket, math.max(0, sum + change)))
    end
  end
end
