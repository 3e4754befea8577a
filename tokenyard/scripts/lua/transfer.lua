#!lua flags=allow-oom
-- Move entries with a tenant, which came by plain XADD into a common intake, to that tenant's.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] intake:<class> (stream)
-- KEYS[3...] for each entry: intake:<class>:<tenant> (stream), request:<client>/<id> (hash)
-- ARGV[1] the caller's leader token
-- ARGV[2...] for each entry: its id, the name of the tenant's intake, <class>:<tenant>, its digest
-- Returns -1 NOT_LEADER, or for each entry: {1, server id} MOVED, {2, limit, retry after in ms or -1} QUOTA
--   (a limit of the tenant refuses it, as in `submit`, or `max_num_queued_reqs`; it stays), {5, ''} GONE (it does not wait there any
--   more)
-- Atomic, because an entry must be in one intake at every moment.

-- @include asked_of
-- @include counted
-- @include enter_intake
-- @include entry_fields
-- @include keep_count
-- @include leave_intake
-- @include prefix_of
-- @include queue_tokens
-- @include queued_tokens_of
-- @include quota_of
-- @include server_ms
-- @include waits_at

local NOT_LEADER, MOVED, QUOTA, GONE = -1, 1, 2, 5
local SOON_MS = 1000
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

-- As in `submit`, a tenant takes no more of the yard's queue than it leaves, here by what all tenants have:
-- these entries wait already, in the same intake as what came without a tenant behind them.
local prefix = prefix_of(KEYS[2])
local most = tonumber(redis.call('HGET', prefix .. 'info', 'max_num_queued_reqs') or '0') or 0
local function is_full(name)
  if most <= 0 then return false end
  local own = counted(prefix .. 'tenant:' .. name:match(':(.*)$'), 'waiting')
  return counted(prefix .. 'tally', 'tenants_waiting') + own >= most
end

-- What is reserved for a request is kept in its ledger, which an entry by XADD has only from here on.
local function reserve(intake, quota, ledger, asked, fields, digest, sid)
  local size = queued_tokens_of(fields)
  local reserved = quota.take(asked, size)
  if not reserved then return end
  redis.call('HSET', ledger, 'state', 'waiting', 'sid', sid, 'digest', digest, 'reserved', reserved)
  queue_tokens(prefix .. 'tally', intake, size)
end

local quotas = {}
local function move(intake, ledger, entry, name, digest, fields)
  if quotas[intake] == nil then quotas[intake] = quota_of(intake) or false end
  local known = redis.call('HMGET', ledger, 'state', 'sid', 'intake', 'entry')
  local quota, asked = not known[1] and quotas[intake], nil
  if not known[1] and is_full(name) then return {QUOTA, 'max_num_queued_reqs', SOON_MS} end
  if quota then
    asked = asked_of(entry_fields(fields), prefix .. 'info')
    local limit, time = quota.over(asked, queued_tokens_of(fields))
    if limit then
      quota.refuse(limit)
      return {QUOTA, limit, time or SOON_MS}
    end
  end
  local at = add(intake, entry, fields)
  local sid = name .. '/' .. at
  enter_intake(intake, 1, queued_tokens_of(fields))
  if quota then
    reserve(intake, quota, ledger, asked, fields, digest, sid)
  elseif known[1] == 'waiting' and waits_at(known[2], known[3], known[4]) == here .. entry then
    -- A client of an earlier version has submitted it.
    redis.call('HSET', ledger, 'sid', sid)
    redis.call('HDEL', ledger, 'intake', 'entry')
    keep_count(prefix .. 'tally', 'tenants_queued_tokens', queued_tokens_of(fields))
  end
  return {MOVED, sid}
end

local replies, leaving, a = {}, {}, 2
for k = 3, #KEYS, 2 do
  local entry = ARGV[a]
  local found = not leaving[entry] and redis.call('XRANGE', KEYS[2], entry, entry)[1]
  local reply = found and move(KEYS[k], KEYS[k + 1], entry, ARGV[a + 1], ARGV[a + 2], found[2])
    or {GONE, ''}
  if reply[1] ~= QUOTA then leaving[#leaving + 1], leaving[entry] = entry, true end
  replies[#replies + 1] = reply
  a = a + 3
end
for _, quota in pairs(quotas) do
  if quota then quota.keep() end
end
leave_intake(KEYS[2], leaving)
return replies
