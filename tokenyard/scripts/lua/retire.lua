#!lua flags=allow-oom
-- A worker leaves, or its controller reports its death: its lease ends now.
--
-- KEYS[1] leases (zset): lease expiry in ms by worker; 0 lost, -1 left, -2 crashed
-- KEYS[2] workers (hash): the roster
-- KEYS[3] lane:<worker> (stream)
-- KEYS[4] events (stream)
-- KEYS[5] departed (hash): why a worker is gone, by worker
-- KEYS[6] quarantine (hash): the entry that runs alone, by worker
-- ARGV[1] the worker
-- ARGV[2] why: left (in order: does not count for its requests), lost (killed from outside),
--   crashed (its requests are suspects)
-- ARGV[3] the reason, as text
-- Returns the number of entries on its lane that the rescuer has to move, or -1 UNKNOWN
-- Atomic, because an entry dispatched after the count would be forgotten.

-- @include has_lease

local UNKNOWN = -1
local SCORE = {left = -1, lost = 0, crashed = -2}
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return UNKNOWN end
local rest = redis.call('XLEN', KEYS[3])
if rest == 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('DEL', KEYS[3])
  redis.call('HDEL', KEYS[6], ARGV[1])
elseif has_lease(KEYS[1], ARGV[1]) then -- otherwise the first reason stands
  redis.call('ZADD', KEYS[1], SCORE[ARGV[2]], ARGV[1])
  redis.call('HSET', KEYS[5], ARGV[1], ARGV[3])
end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'event', 'gone', 'worker', ARGV[1])
return rest
