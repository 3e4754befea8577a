#!lua flags=allow-oom
-- Change the desired state of a scope, and tell everybody.
--
-- KEYS[1] desired (hash): JSON by scope; `changed`: the entry that changed one last
-- KEYS[2] control (stream)
-- KEYS[3] events (stream)
-- ARGV[1] scope
-- ARGV[2] the desired state that the caller has seen there (JSON), '' for none
-- ARGV[3] the desired state from now on (JSON), '' for none
-- ARGV[4...] the fields of the control entry and their values
-- Returns the signal's id, or '' where the scope has another desired state than the caller has seen
-- Atomic, because of two operators at once one must see what the other did, and because who
-- reads the hash must know which signals are in it.

local seen = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if seen ~= ARGV[2] then return '' end
local entry = redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', unpack(ARGV, 4))
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
redis.call('HSET', KEYS[1], 'changed', entry)
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'event', 'signal')
return entry
