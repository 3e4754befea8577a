#!lua flags=allow-oom
-- Move an entry that cannot be answered to the dead letters, with the reason.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] intake:<intake> (stream)
-- KEYS[3] dead (stream)
-- ARGV[1] the caller's leader token
-- ARGV[2] the intake's name
-- ARGV[3] entry id
-- ARGV[4] the reason
-- ARGV[5] most dead letters kept, about
-- Returns -1 NOT_LEADER, 1 BURIED, 5 GONE (no such entry any more)
-- Atomic, because the entry must be in the intake or among the dead letters at every moment.

-- @include leave_intake
-- @include queued_tokens_of
-- @include to_dead_letters

local NOT_LEADER, BURIED, GONE = -1, 1, 5
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
local found = redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3])[1]
leave_intake(KEYS[2], {ARGV[3]}, found and queued_tokens_of(found[2]))
if not found then return GONE end
to_dead_letters(KEYS[3], ARGV[5], found[2], ARGV[4], ARGV[2] .. '/' .. ARGV[3])
return BURIED
