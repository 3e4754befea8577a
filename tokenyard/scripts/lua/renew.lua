#!lua flags=allow-oom
-- Extend the leases that workers still hold, and update their roster entries.
--
-- KEYS[1] leases (zset): lease expiry in ms by worker
-- KEYS[2] workers (hash): the roster
-- KEYS[3] events (stream): what a worker does has changed; how much it has done (tally) is no news
-- ARGV[1] length of the lease in ms
-- ARGV[2...] for each worker: the worker, its roster entry (JSON)
-- Returns one code for each worker: 1 HELD, 0 LOST (it must stop and register again)
-- Atomic, because a lease that the rescuer has taken must not come back.

-- @include has_lease
-- @include server_ms

local HELD, LOST = 1, 0

local function news(entry)
  return entry and string.gsub(entry, ',?"tally":%b{}', '')
end

local expires = server_ms() + tonumber(ARGV[1])
local replies = {}
for i = 2, #ARGV, 2 do
  if has_lease(KEYS[1], ARGV[i]) then
    redis.call('ZADD', KEYS[1], expires, ARGV[i])
    local before = redis.call('HGET', KEYS[2], ARGV[i])
    if before ~= ARGV[i + 1] then
      redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
    end
    if news(before) ~= news(ARGV[i + 1]) then
      redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'event', 'changed', 'worker', ARGV[i])
    end
    replies[#replies + 1] = HELD
  else
    replies[#replies + 1] = LOST
  end
end
return replies
