-- Accept a burst of requests of one priority class, each at most once.
--
-- KEYS[1] info (hash): limits, written by the leader
-- KEYS[2] intake:high (stream)
-- KEYS[3] intake:normal (stream)
-- KEYS[4] intake:low (stream)
-- KEYS[5] intake:retry (stream)
-- KEYS[6] clients (zset): lease expiry in ms by client, of those that want it watched
-- KEYS[7] attached:<client> (set): ids to cancel when that lease ends
-- KEYS[8] tally (hash): counters
-- KEYS[9...] request:<client>/<id> (hash), one for each request; behind them, for those of a tenant,
--   intake:<class>:<tenant> (stream). The tenant's other keys have names that follow from it
-- ARGV[1] priority class: high, normal or low; for those of a tenant <class>:<tenant>
-- ARGV[2] the client, if its requests (also those that it has submitted before) are to be
--   cancelled when it disappears, else ''
-- ARGV[3] length of that client's lease in ms
-- ARGV[4] time in s for which media of a request that does not end are kept
-- ARGV[5] number of templates: what requests have in common
-- ARGV[6...] for each template: the field that holds the prompt, the field `common` (JSON), the time in
--   ms since the epoch after which a request is refused if it would have to wait longer (0: never);
--   then for each request: its template (from 1), its id, its prompt, its digest (any text that is
--   the same for the same request; '': not to be compared), its media (a msgpack map; '': none), which
--   are kept as media:<client>/<id>
-- Returns for each request: {1, server id, requests before it, their time in ms or -1} ACCEPTED,
--   {2, state} KNOWN, {0, retry after in ms} FULL, {3, time it would have to wait in ms} LATE,
--   {4, state} REUSED (the id is known with another digest), {5, limit, retry after in ms or -1} QUOTA
--   (a limit of the tenant refuses it; -1: each time)
-- Atomic, because two submitters of one id must not both find it unknown.
-- Without `allow-oom`, which all other scripts have: a server without memory refuses new
-- requests, and what it has accepted still ends and gives memory back.

-- @include asked_of
-- @include count_in
-- @include counted
-- @include enter_intake
-- @include is_reused
-- @include keep_count
-- @include media_of
-- @include queued_tokens_of
-- @include quota_of
-- @include server_ms
-- @include tenant_of

local ACCEPTED, KNOWN, FULL, LATE, REUSED, QUOTA = 1, 2, 0, 3, 4, 5
-- What a refused client is told: the time in which room for it is likely, within these bounds, and
-- then earlier or later by chance.
local LEAST_RETRY_MS, USUAL_RETRY_MS, MOST_RETRY_MS = 100, 1000, 30000
-- Of the time for all that waits: who comes again then finds work left.
local RETRY_SHARE, JITTER = 0.25, 0.25
local RANK, CLASSES = {high = 2, normal = 3, low = 4}, {[2] = 'high', [3] = 'normal', [4] = 'low'}
local name, client = ARGV[1], ARGV[2]
local class, tenant = name:match('^(%l+):?(.*)$')
local is_tenant = tenant ~= ''
local last_ledger = is_tenant and #KEYS - 1 or #KEYS
local intake = is_tenant and KEYS[#KEYS] or KEYS[RANK[class]]

-- Retries and higher classes are served before it; with it and lower ones it shares its bound.
local waiting, ahead, below, untenanted = 0, 0, 0, 0
local have_tenants = counted(KEYS[8], 'tenants_waiting') > 0
for i = 2, 5 do
  local length = redis.call('XLEN', KEYS[i])
  if CLASSES[i] then untenanted = untenanted + length end
  if have_tenants and CLASSES[i] then
    length = length + counted(KEYS[8], 'tenants_waiting:' .. CLASSES[i])
  end
  waiting = waiting + length
  if i <= RANK[class] or i == 5 then ahead = ahead + length end
  if i >= RANK[class] and i < 5 then below = below + length end
end
local info = redis.call('HMGET', KEYS[1], 'max_num_queued_reqs', 'max_num_queued_tokens', 'rate',
  'waiting_clients', 'max_' .. class .. '_share', 'has_tenants')
local share = tonumber(info[5] or '1') or 1
local most = tonumber(info[1] or '0') or 0
local most_below = math.ceil(most * share)
local most_tokens = (tonumber(info[2] or '0') or 0) * share
-- An operator may empty an intake by hand: then nothing is queued, whatever was counted.
local queued_tokens = waiting > 0 and counted(KEYS[8], 'queued_tokens') or 0
local rate = tonumber(info[3] or '0') or 0
local clients = math.max(1, tonumber(info[4] or '1') or 1)
-- What leaves as much of the queue free as it takes: a tenant, and beside tenants those without one.
local is_bound = is_tenant or have_tenants or info[6] == '1'
local own, own_tokens = 0, 0
if is_bound and not is_tenant then
  local theirs = have_tenants and counted(KEYS[8], 'tenants_queued_tokens') or 0
  own, own_tokens = untenanted, math.max(0, queued_tokens - theirs)
elseif is_tenant then -- it waits for its own, at an equal share
  local prefix = tenant_of(intake)
  own = counted(prefix .. 'tenant:' .. tenant, 'waiting')
  own_tokens = counted(prefix .. 'tenant:' .. tenant, 'waiting_tokens')
  ahead = own
  rate = rate / math.max(1, redis.call('ZCARD', prefix .. 'line'))
end
local accepted, added, attached, came_ms = 0, 0, false, nil
local refused = {QUEUE_FULL = 0, DEADLINE_EXCEEDED = 0, ID_REUSED = 0, QUOTA_EXCEEDED = 0}
local quota = is_tenant and quota_of(intake)

local function time_for(requests)
  if rate <= 0 then return -1 end
  return math.floor(requests * 1000 / rate)
end

-- When it is this client's turn to add to the queue, but not before a good part of that is done;
-- and not for all at the same moment. Lua's own random numbers are the same in each call.
local function retry_after(before)
  local over = math.max(waiting - most, below - most_below, 0) + 1 + before
  local time = math.max(time_for(over * clients), time_for(waiting) * RETRY_SHARE)
  if time < 0 then time = USUAL_RETRY_MS end
  local now = redis.call('TIME')[2]
  local jitter = ((now + before) * 7919 % 1000 / 500 - 1) * JITTER
  return math.floor(math.max(LEAST_RETRY_MS, math.min(MOST_RETRY_MS, time)) * (1 + jitter))
end

-- Nobody takes more than it leaves, so that there is room for the next tenant.
local function is_full(tokens)
  return most > 0 and (waiting + own >= most or below + own >= most_below)
    or most_tokens > 0 and waiting > 0 and queued_tokens + own_tokens + tokens > most_tokens
end

local function attach(id)
  if client == '' then return end
  redis.call('SADD', KEYS[7], id)
  attached = true
end

local templates = {}
for i = 1, tonumber(ARGV[5]) do
  local at = 3 + 3 * i
  templates[i] = {field = ARGV[at], common = ARGV[at + 1], latest = tonumber(ARGV[at + 2])}
end

-- Nearly always all of them are new, which one command says.
local MOST_UNPACKED = 1000
local known = 0
for first = 9, last_ledger, MOST_UNPACKED do
  local last = math.min(first + MOST_UNPACKED - 1, last_ledger)
  known = known + redis.call('EXISTS', unpack(KEYS, first, last))
end
local came = {}
local NOTHING = {}
local function state_and_digest_of(ledger)
  if known > 0 or came[ledger] then return redis.call('HMGET', ledger, 'state', 'digest') end
  came[ledger] = true
  return NOTHING
end

local function asked_by(template)
  if not template.asked then
    local is_read, fields = pcall(cjson.decode, template.common)
    template.asked = asked_of(is_read and type(fields) == 'table' and fields or {}, KEYS[1])
  end
  return template.asked
end

-- The limit of the tenant that refuses a request, and the time after which it does not.
local function limit_for(template, tokens)
  local limit, time = quota.over(asked_by(template), tokens)
  return limit, limit and (time or retry_after(refused.QUOTA_EXCEEDED))
end

local replies, at, content = {}, 6 + 3 * #templates, {'', '', 'common', ''}
for i = 9, last_ledger do
  local ledger, template, id = KEYS[i], templates[tonumber(ARGV[at])], ARGV[at + 1]
  local prompt, digest, latest = ARGV[at + 2], ARGV[at + 3], template.latest
  content[1], content[2], content[4] = template.field, prompt, template.common
  local tokens = queued_tokens_of(content)
  local first = state_and_digest_of(ledger)
  local state = first[1]
  local time = time_for(ahead)
  local limit, retry_ms
  if quota and not state then limit, retry_ms = limit_for(template, tokens) end
  if state and is_reused(first[2], digest) then
    replies[#replies + 1] = {REUSED, state}
    refused.ID_REUSED = refused.ID_REUSED + 1
  elseif state then
    -- A write, which changes nothing: who waits for his writes waits for what he found, too.
    redis.call('HSET', ledger, 'state', state)
    replies[#replies + 1] = {KNOWN, state}
    if state == 'waiting' or state == 'assigned' then attach(id) end
  elseif limit then
    replies[#replies + 1] = {QUOTA, limit, retry_ms}
    refused.QUOTA_EXCEEDED = refused.QUOTA_EXCEEDED + 1
    quota.refuse(limit)
  elseif is_full(tokens) then
    replies[#replies + 1] = {FULL, retry_after(refused.QUEUE_FULL)}
    refused.QUEUE_FULL = refused.QUEUE_FULL + 1
    came_ms = is_tenant and string.format('%.0f', server_ms())
  elseif latest > 0 and time > 0 and server_ms() + time > latest then
    replies[#replies + 1] = {LATE, time}
    refused.DEADLINE_EXCEEDED = refused.DEADLINE_EXCEEDED + 1
  else
    local entry = redis.call('XADD', intake, '*', 'id', id, template.field, prompt,
      'common', template.common)
    local sid = name .. '/' .. entry
    redis.call('HSET', ledger, 'state', 'waiting', 'sid', sid, 'digest', digest)
    if ARGV[at + 4] ~= '' then
      redis.call('SET', media_of(ledger), ARGV[at + 4], 'EX', ARGV[4])
      redis.call('HSET', ledger, 'media', 1)
    end
    local reserved = quota and quota.take(asked_by(template), tokens)
    if reserved then redis.call('HSET', ledger, 'reserved', reserved) end
    replies[#replies + 1] = {ACCEPTED, sid, ahead, time}
    waiting, ahead, below = waiting + 1, ahead + 1, below + 1
    if is_bound then own, own_tokens = own + 1, own_tokens + tokens end
    if is_tenant then added, came_ms = added + tokens, entry:match('^%d+') end
    queued_tokens = queued_tokens + tokens
    accepted = accepted + 1
    attach(id)
  end
  at = at + 5
end
-- The leader then tells those without a tenant that there are some, see `has_tenants`.
if came_ms then redis.call('HSET', KEYS[8], 'tenant_came', came_ms) end
if accepted > 0 then
  redis.call('HSET', KEYS[8], 'queued_tokens', queued_tokens)
  if is_tenant then
    if not have_tenants then redis.call('HSET', KEYS[8], 'tenants_queued_tokens', 0) end
    keep_count(KEYS[8], 'tenants_queued_tokens', added)
    enter_intake(intake, accepted, added)
  end
  if quota then quota.keep() end
end
if attached then redis.call('ZADD', KEYS[6], server_ms() + tonumber(ARGV[3]), client) end
-- Nobody else hears of these: the leader's metrics take the counts from here.
for code, count in pairs(refused) do
  if count > 0 then count_in(KEYS[8], 'count:' .. code, count) end
end
return replies
