#!lua flags=allow-oom
-- Move entries with a tenant, which came by plain XADD into a common intake, to that tenant's.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] intake:<class> (stream)
-- KEYS[3...] for each entry: intake:<class>:<tenant> (stream), request:<client>/<id> (hash)
-- ARGV[1] the caller's leader token
-- ARGV[2] the intake's consumer group
-- ARGV[3...] for each entry: its id, the name of the tenant's intake, <class>:<tenant>
-- Returns -1 NOT_LEADER, or one code for each entry: 1 MOVED, 5 GONE (it does not wait there any more)
-- Atomic, because an entry must be in one intake at every moment.

-- @include enter_intake
-- @include leave_intake
-- @include queued_tokens_of
-- @include server_ms
-- @include waits_at

local NOT_LEADER, MOVED, GONE = -1, 1, 5
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
local here = KEYS[2]:match('intake:(.*)$') .. '/'

-- It keeps its id, and so the time at which it came, where that is possible. Lua can unpack only so many
-- fields, and the coordinator refuses an entry of more than 100.
local MOST_VALUES, now = 256, server_ms()
local function add(intake, entry, fields)
  local values = fields
  if #fields > MOST_VALUES then values = {unpack(fields, 1, MOST_VALUES)} end
  if tonumber(entry:match('^%d+')) <= now then
    local added = redis.pcall('XADD', intake, entry, unpack(values))
    if type(added) == 'string' then return added end
  end
  return redis.call('XADD', intake, '*', unpack(values))
end

local replies, leaving = {}, {}
for k = 3, #KEYS, 2 do
  local a = k
  local intake, ledger, entry, name = KEYS[k], KEYS[k + 1], ARGV[a], ARGV[a + 1]
  local found = not leaving[entry] and redis.call('XRANGE', KEYS[2], entry, entry)[1]
  if found then
    local at = add(intake, entry, found[2])
    enter_intake(intake, 1, queued_tokens_of(found[2]))
    -- A client of an earlier version has submitted it.
    local known = redis.call('HMGET', ledger, 'state', 'sid', 'intake', 'entry')
    if known[1] == 'waiting' and waits_at(known[2], known[3], known[4]) == here .. entry then
      redis.call('HSET', ledger, 'sid', name .. '/' .. at)
      redis.call('HDEL', ledger, 'intake', 'entry')
    end
  end
  leaving[#leaving + 1], leaving[entry] = entry, true
  replies[#replies + 1] = found and MOVED or GONE
end
leave_intake(KEYS[2], ARGV[2], leaving)
return replies
