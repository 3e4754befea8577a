#!lua flags=allow-oom
-- Change the desired state of a scope, and announce it.
--
-- KEYS[1] desired (hash): JSON by scope; `changed`: the entry that changed one last
-- KEYS[2] control (stream)
-- KEYS[3] events (stream)
-- ARGV[1] scope
-- ARGV[2] the desired state that the caller has read there (JSON), '' for none
-- ARGV[3] the new desired state (JSON), '' for none
-- ARGV[4...] the fields of the control entry and their values
-- Returns the signal's id, or '' where the scope has another desired state than the caller has read
-- Atomic, because of two simultaneous operators one must see the other's change, and because a
-- reader of the hash must know which signals it includes.

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
