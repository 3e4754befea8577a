#!lua flags=no-writes
-- The clients whose leases have expired, so that their attached requests are cancelled.
--
-- KEYS[1] clients (zset): lease expiry in ms by client
-- ARGV[1] most clients to name
-- ARGV[2] the caller's idea of the server's time in ms
-- Returns their names
-- Atomic by itself: nothing is changed.

-- @include is_time

if not is_time(tonumber(ARGV[2])) then return {} end
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[2], 'LIMIT', 0, ARGV[1])
