#!lua flags=allow-oom
-- Show that a coordinator stands by, for some time.
--
-- KEYS[1] standbys (zset): coordinator to the end of that time in ms
-- ARGV[1] the coordinator's name
-- ARGV[2] that time in ms from now; 0: it ends
-- Returns 1
-- Atomic, because those whose time is over go at the same time.

-- @include server_ms

local now = server_ms()
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return 1
