#!lua flags=allow-oom
-- A client without permission to cancel asks the leader to cancel one of its requests.
--
-- KEYS[1] cancels:<client> (set): ids of its requests that the leader is to cancel
-- KEYS[2] cancelling (stream): clients that have such ids
-- ARGV[1] the client
-- ARGV[2] request id
-- ARGV[3] most ids of a client that may wait
-- ARGV[4] time to live of those ids in s
-- Returns 1 REQUESTED, 0 FULL (so many wait already: no coordinator leads)
-- Atomic, because the number of ids of a client is bounded.

local REQUESTED, FULL = 1, 0
local is_new = redis.call('SISMEMBER', KEYS[1], ARGV[2]) == 0
if is_new and redis.call('SCARD', KEYS[1]) >= tonumber(ARGV[3]) then return FULL end
redis.call('SADD', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'client', ARGV[1])
return REQUESTED
