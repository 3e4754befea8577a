#!lua flags=allow-oom
-- Correct the leases that count by the clock that the server had before it was set.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] leases (zset): lease expiry in ms by worker
-- KEYS[3] clients (zset): lease expiry in ms by client
-- ARGV[1] the caller's leader token
-- ARGV[2] by how much the clock was set ahead, in ms: leases that held by the clock of before get that
--   much more; 0 if it was set back, or may have been
-- ARGV[3] length of the longest lease in ms: none ends later than so long from now
-- ARGV[4] most leases to correct of each key
-- Returns -1 NOT_LEADER, or how many were corrected, of the key of which most were
-- Atomic, because a worker may renew its lease meanwhile, which is then by the new clock.

-- @include server_ms

local NOT_LEADER = -1
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
local ahead, now, count = tonumber(ARGV[2]), server_ms(), 0
local latest = now + tonumber(ARGV[3])
local function text(ms) return string.format('%.0f', ms) end
for i = 2, 3 do
  local found = redis.call('ZRANGEBYSCORE', KEYS[i], '(' .. text(latest), '+inf', 'LIMIT', 0, ARGV[4])
  for _, holder in ipairs(found) do redis.call('ZADD', KEYS[i], text(latest), holder) end
  count = math.max(count, #found)
  if ahead > 0 then
    found = redis.call('ZRANGEBYSCORE', KEYS[i], text(math.max(1, now - ahead)), '(' .. text(now),
      'WITHSCORES', 'LIMIT', 0, ARGV[4])
    for at = 1, #found, 2 do
      redis.call('ZADD', KEYS[i], text(tonumber(found[at + 1]) + ahead), found[at])
    end
    count = math.max(count, #found / 2)
  end
end
return count
