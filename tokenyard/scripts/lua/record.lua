#!lua flags=allow-oom
-- Add an entry to the history of the yard, with what waits now.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] history (stream)
-- KEYS[3] tally (hash): counts what waits in the intakes of tenants
-- KEYS[4...] intake:<class> (stream) of each class
-- ARGV[1] the caller's leader token
-- ARGV[2] most entries, about
-- ARGV[3...] for each class: its name; then the other fields and their values
-- Returns 1 RECORDED, 0 NOT_LEADER
-- Atomic, because a former leader must not write into its successor's history.

-- @include counted

local RECORDED, NOT_LEADER = 1, 0
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end

local fields = {'waiting_of_tenants', counted(KEYS[3], 'tenants_waiting')}
local a = 3
for k = 4, #KEYS do
  local name = ARGV[a]
  fields[#fields + 1] = 'waiting:' .. name
  fields[#fields + 1] = redis.call('XLEN', KEYS[k]) + counted(KEYS[3], 'tenants_waiting:' .. name)
  a = a + 1
end
for i = a, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', unpack(fields))
return RECORDED
