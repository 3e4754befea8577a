#!lua flags=allow-oom
-- A new leader prepares the yard and publishes the handshake; also when that changes.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] info (hash)
-- KEYS[3] intake:retry (stream)
-- KEYS[4] intake:high (stream)
-- KEYS[5] intake:normal (stream)
-- KEYS[6] intake:low (stream)
-- KEYS[7] events (stream)
-- KEYS[8] capacity (stream)
-- KEYS[9] cancelling (stream)
-- KEYS[10] arrivals (stream)
-- ARGV[1] the caller's leader token
-- ARGV[2] the consumer group of the streams
-- ARGV[3...] fields of info and their values
-- Returns -1 NOT_LEADER, 1 READY
-- Atomic, because a former leader must not speak for its successor. In a script at all, because
-- a server without memory refuses these commands otherwise, and only a leader can free some.

local NOT_LEADER, READY = -1, 1
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
for i = 3, 10 do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[i], ARGV[2], '0', 'MKSTREAM')
  if made.err and not made.err:find('BUSYGROUP') then return made end
end
redis.call('HSET', KEYS[2], unpack(ARGV, 3))
return READY
