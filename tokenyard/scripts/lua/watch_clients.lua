#!lua flags=no-writes
-- The clients whose leases have expired, so that their attached requests are cancelled.
--
-- KEYS[1] clients (zset): lease expiry in ms by client
-- ARGV[1] most clients to name
-- Returns their names
-- Atomic by itself: nothing is changed.

-- @include server_ms

return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', server_ms(), 'LIMIT', 0, ARGV[1])
