#!lua flags=allow-oom
-- A worker hands back a request that its engine could not serve; it is retried later.
--
-- KEYS[1] leases (zset): lease expiry in ms by worker
-- KEYS[2] lane:<worker> (stream)
-- KEYS[3] capacity (stream)
-- KEYS[4] intake:retry (stream)
-- KEYS[5] quarantine (hash): the entry that runs alone, by worker
-- KEYS[6] request:<client>/<id> (hash)
-- KEYS[7] tokens:<client>/<id> (string)
-- KEYS[8] tokens:<client>#/<id> (string): whose those are
-- ARGV[1] the worker
-- ARGV[2] lane entry
-- ARGV[3] attempt
-- ARGV[4] pause before the next attempt in ms
-- ARGV[5] the error
-- ARGV[6] the worker's base model
-- Returns -1 LEASE_LOST, 1 HANDED_BACK, 0 STALE (another attempt has the request, or none)
-- Atomic, because the request must be on the lane or in the intake at every moment, and its charge
-- must be given back only once.

-- @include back_fields
-- @include count_up
-- @include end_quarantine
-- @include give_back
-- @include has_lease
-- @include server_ms

local LEASE_LOST, HANDED_BACK, STALE = -1, 1, 0
if not has_lease(KEYS[1], ARGV[1]) then return LEASE_LOST end
local lane, ledger, entry = KEYS[2], KEYS[6], ARGV[2]
local owner = redis.call('HMGET', ledger, 'worker', 'attempt', 'state', 'entry')
if owner[1] ~= ARGV[1] or owner[2] ~= ARGV[3] or owner[3] ~= 'assigned' or owner[4] ~= entry then
  return STALE
end
local found = redis.call('XRANGE', lane, entry, entry)[1]
if not found then return STALE end
redis.call('XDEL', lane, entry)
end_quarantine(KEYS[5], ARGV[1], entry)
local now = server_ms()
count_up(ledger, 'faults')
redis.call('HSET', ledger, 'reason', ARGV[5], 'not_before', now + tonumber(ARGV[4]))
local back = redis.call('XADD', KEYS[4], '*',
  unpack(back_fields(found[2], ledger, KEYS[7], KEYS[8], ARGV[6])))
redis.call('HSET', ledger, 'state', 'waiting', 'intake', 'retry', 'entry', back,
  'r' .. ARGV[3], now .. ' ' .. ARGV[1] .. ' fault ' .. ARGV[5])
redis.call('HDEL', ledger, 'worker')
give_back(ledger)
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'event', 'capacity', 'worker', ARGV[1],
  'count', 1)
return HANDED_BACK
