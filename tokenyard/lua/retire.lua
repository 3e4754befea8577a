#!lua flags=allow-oom
-- A worker leaves, or its controller has seen it die: its lease ends now.
--
-- KEYS[1] leases (zset): lease expiry in ms by worker; 0 lost, -1 left
-- KEYS[2] workers (hash): the roster
-- KEYS[3] lane:<worker> (stream)
-- KEYS[4] events (stream)
-- ARGV[1] the worker
-- ARGV[2] why: left (of its own will: costs its requests no attempt) or lost (it died)
-- Returns the number of entries on its lane that the rescuer has to move, or -1 UNKNOWN
-- Atomic, because an entry dispatched after the count would be forgotten.

-- @include has_lease

local UNKNOWN = -1
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return UNKNOWN end
local rest = redis.call('XLEN', KEYS[3])
if rest == 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('DEL', KEYS[3])
elseif has_lease(KEYS[1], ARGV[1]) then -- otherwise the first reason stands
  redis.call('ZADD', KEYS[1], ARGV[2] == 'left' and -1 or 0, ARGV[1])
end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'event', 'gone', 'worker', ARGV[1])
return rest
