#!lua flags=allow-oom
-- Give up the lead, so that a standby need not wait for the lease to expire.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] events (stream)
-- ARGV[1] the caller's leader token
-- Returns 1 RESIGNED, 0 NOT_LEADER
-- Atomic, because a former leader must not end its successor's lease.

local RESIGNED, NOT_LEADER = 1, 0
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
redis.call('DEL', KEYS[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'event', 'resigned')
return RESIGNED
