#!lua flags=allow-oom
-- A worker joins: it gets a new incarnation, an empty lane and a lease.
--
-- KEYS[1] info (hash): holds the counter of incarnations
-- KEYS[2] workers (hash): the roster
-- KEYS[3] leases (zset): lease expiry in ms by worker
-- KEYS[4] events (stream)
-- ARGV[1] the worker's name
-- ARGV[2] length of the lease in ms
-- ARGV[3] its roster entry (JSON)
-- Returns the worker: "<name>.<incarnation>"
-- Atomic, because a worker that the roster shows must hold a lease.

-- @include server_ms
-- @include next_in

local worker = ARGV[1] .. '.' .. next_in(KEYS[1], 'incarnation')
redis.call('HSET', KEYS[2], worker, ARGV[3])
redis.call('ZADD', KEYS[3], server_ms() + tonumber(ARGV[2]), worker)
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'event', 'joined', 'worker', worker)
return worker
