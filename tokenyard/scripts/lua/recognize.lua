#!lua flags=allow-oom
-- Check whether the yard is on another server than before: on a promoted replica, which may lack the
-- last writes of its master. Then every worker loses its lease, and joins again.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] info (hash): holds the server seen last, and the counter of incarnations
-- KEYS[3] leases (zset): lease expiry in ms by worker; -1 left
-- KEYS[4] departed (hash): why a worker is gone, by worker
-- KEYS[5] events (stream)
-- ARGV[1] the caller's leader token
-- ARGV[2] the server, by the id of its process
-- ARGV[3] 1 if that process has been a replica, else 0
-- ARGV[4] its replication id, '' if that is not known
-- ARGV[5] the replication id of the server that it has replaced last, '' if any counts
-- Returns -1 NOT_LEADER, or the number of workers that were fenced
-- Atomic, because no earlier worker may get a request on the new server.

-- @include has_lease

local NOT_LEADER = -1
-- More incarnations than can have joined in the lost writes: none may be given out twice.
local SKIPPED = 1000
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
local known = redis.call('HMGET', KEYS[2], 'server', 'replication')
redis.call('HSET', KEYS[2], 'server', ARGV[2], 'replication', ARGV[4])
if not known[1] or known[1] == ARGV[2] or ARGV[3] ~= '1' then return 0 end
if ARGV[5] ~= '' and (known[2] or '') ~= '' and known[2] ~= ARGV[5] then return 0 end

local fenced = 0
for _, worker in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if has_lease(KEYS[3], worker) then
    redis.call('ZADD', KEYS[3], -1, worker)
    redis.call('HSET', KEYS[4], worker, 'a replica took the place of the server')
    fenced = fenced + 1
  end
end
-- An invalid counter restarts at the next registration, far beyond.
redis.pcall('HINCRBY', KEYS[2], 'incarnation', SKIPPED)
redis.call('XADD', KEYS[5], 'MAXLEN', '~', 1000, '*', 'event', 'gone', 'worker', '')
return fenced
