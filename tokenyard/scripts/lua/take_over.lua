#!lua flags=allow-oom
-- A new leader publishes the handshake; also when that changes.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] info (hash)
-- ARGV[1] the caller's leader token
-- ARGV[2...] fields of info and their values
-- Returns -1 NOT_LEADER, 1 READY
-- Atomic, because a former leader must not speak for its successor. In a script at all, because
-- a server without memory refuses the command otherwise, and only a leader can free some.

local NOT_LEADER, READY = -1, 1
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
return READY
