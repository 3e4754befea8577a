#!lua flags=allow-oom
-- Move intake entries onto lanes, one hand-over for each, all of one round in one call.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] leases (zset): lease expiry in ms by worker
-- KEYS[3] tally (hash)
-- KEYS[4] quarantine (hash): what is on trial on a lane, by worker: the entry that runs alone; or
--   '<entry>+<count>', a group, its first entry and its size; or '-', nothing at the moment
-- KEYS[5...] for each route from an intake to a lane: intake:<intake> (stream),
--   lane:<worker> (stream); then for each item: request:<client>/<id> (hash)
-- ARGV[1] the caller's leader token
-- ARGV[2...] number of routes; for each: intake, worker, most entries on that lane, 1 if an item must
--   be alone there, 2 if its items are a group on trial (else 0); then for each item: its route (from
--   1), entry id, why there (words, for the record), the digest of the request ('': not to be
--   compared); behind them, for each item that is charged to a tenant: its number (from 1), the charge
--   (see `read_charge`), after which the names of the tenant's keys follow from the lane's; and for
--   each item whose deadline is by another clock: minus its number, its deadline by today's
-- Returns -1 NOT_LEADER, or one code for each item: 1 DISPATCHED, 2 DUPLICATE (dropped),
--   3 CLOSED (the worker's lease is gone; the entry stays), 4 FULL (the lane is; the entry
--   stays), 5 GONE (nobody waits there any more), 6 REUSED (the id is
--   known with another digest; the entry stays), 7 HELD (its tenant has as many requests running as
--   it may; the entry stays)
-- Atomic, because the entry must be in the intake or on the lane at every moment, and because
-- a former leader must move nothing.

-- @include count_in
-- @include count_of_tenants
-- @include counted
-- @include has_lease
-- @include is_reused
-- @include keep_count
-- @include leave_intake
-- @include prefix_of
-- @include queued_tokens_of
-- @include read_charge
-- @include server_ms
-- @include sid_of
-- @include tenant_settings
-- @include tenant_sums
-- @include waits_at
-- @include whole

local NOT_LEADER, DISPATCHED, DUPLICATE, CLOSED, FULL, GONE, REUSED, HELD = -1, 1, 2, 3, 4, 5, 6, 7
-- Fields that only the system writes: a client's own are dropped here.
local SYSTEM = {sid = true, attempt = true, crashes = true, suspected = true, crashed_alone = true,
  lost_alone = true, faults = true, reason = true, not_before = true, published = true,
  epoch = true, trial = true, relapsed = true, choices = true, charged = true, base_model = true}
-- And those of them that go on with a retry.
local CARRIED = {published = true, epoch = true, choices = true}
local NO_CHARGE = {}
-- What is looked at in a ledger: only a retry has been through anything.
local KNOWN = {'state', 'sid', 'intake', 'entry', 'attempt'}
local KNOWN_OF_RETRY = {'state', 'sid', 'intake', 'entry', 'attempt', 'crashes', 'faults'}
-- Names and values together; the coordinator refuses entries of more than 100 fields.
local MOST_VALUES = 256

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end

-- Whether an entry can go onto the lane as it is, which nearly all can.
local seen, entries_seen = {}, 0
local function is_plain(fields)
  if #fields > MOST_VALUES then return false end
  entries_seen = entries_seen + 1
  for i = 1, #fields, 2 do
    local name = fields[i]
    if SYSTEM[name] or seen[name] == entries_seen then return false end
    seen[name] = entries_seen
  end
  return true
end

-- A client may name a field twice, even thousands of times, which is more than Lua can unpack:
-- the last one counts, as it does for the coordinator, which has judged the entry.
local function lane_fields(fields, is_retry, charge, deadline)
  if not charge and not deadline and is_plain(fields) then return fields end
  local out, place = {}, {}
  if charge then out = {'charged', 1} end
  if deadline then
    out[#out + 1], out[#out + 2] = 'deadline', deadline
    place['deadline'] = 0
  end
  for i = 1, #fields, 2 do
    local name = fields[i]
    if not SYSTEM[name] or (is_retry and CARRIED[name]) then
      if not place[name] and #out < MOST_VALUES then
        place[name] = #out + 2
        out[#out + 1] = name
      end
      if (place[name] or 0) > 0 then out[place[name]] = fields[i + 1] end
    end
  end
  return out
end

-- The room on a lane, looked up once for each; only this script adds requests to a lane.
local lanes = {}
local function lane_of(lane, worker)
  if not lanes[worker] then
    local load = redis.call('XLEN', lane)
    local mark = load > 0 and redis.call('HGET', KEYS[4], worker)
    local is_group = mark and mark:find('+', 1, true)
    lanes[worker] = {
      closed = not has_lease(KEYS[2], worker),
      load = load,
      quarantined = mark and mark ~= '-' and not is_group,
      tries = is_group, -- a group that came with an earlier call
    }
  end
  return lanes[worker]
end

-- What leaves the intakes, by intake, taken out at the end in one go: until then the server still
-- shows it there. And the queued tokens that go with it, as `submit` counted them.
local leaving, queued, queued_of_tenants = {}, 0, 0
local function leave(intake, entry, size)
  local list = leaving[intake] or {size = 0}
  leaving[intake] = list
  list[#list + 1], list[entry] = entry, true
  if size then list.size = list.size + size end
end

-- Entries that are wanted mostly stand in a row, so all of an intake are read at the first: a page
-- at a time, until they are very many bytes.
local PAGE, MOST_BYTES = 16, 4 * 1024 * 1024
local wanted, read = {}, {}
local function read_row(intake, entry)
  local entries, left, size = {}, wanted[intake], 0
  local from = entry
  while left > 0 and size < MOST_BYTES do
    local page = redis.call('XRANGE', intake, from, '+', 'COUNT', math.min(left, PAGE))
    for _, item in ipairs(page) do
      entries[item[1]] = item[2]
      for i = 2, #item[2], 2 do size = size + #item[2][i] end
    end
    left = #page < PAGE and 0 or left - PAGE
    from = left > 0 and '(' .. page[PAGE][1]
  end
  return entries
end

local function find(intake, entry)
  read[intake] = read[intake] or read_row(intake, entry)
  local fields = read[intake][entry]
  if fields then return fields end
  local found = redis.call('XRANGE', intake, entry, entry)[1]
  return found and found[2]
end

-- A charge is counted from here on, see `settle_charge`. The wait is that before the first attempt, by
-- powers of two of ms.
local prefix = prefix_of(KEYS[1])
local sums, now = tenant_sums(prefix), nil
local function count_charge(charge, sid, attempt)
  sums.charge(charge.tenant, charge.amount)
  if charge.tenant == '' then return end
  sums.run(charge.tenant, 1)
  if attempt > 1 then return end
  now = now or server_ms()
  local bucket, waited = 1, now - tonumber(sid:match('/(%d+)'))
  while bucket < waited do bucket = 2 * bucket end
  sums.use(charge.tenant, charge.model, {['wait:' .. bucket] = 1})
end

-- Whether a tenant has as many requests running as it may. A retry was one of them, and is not held.
local most_running = {}
local function is_held(tenant)
  if most_running[tenant] == nil then
    local most = (tenant_settings(prefix, tenant) or {})['max_running_requests']
    most_running[tenant] = type(most) == 'number' and most > 0 and most
  end
  local most = most_running[tenant]
  return most and counted(prefix .. 'tenant:' .. tenant, 'running') + sums.running(tenant) >= most
end

local function dispatch(route, ledger, entry, why, digest, charge, deadline)
  local intake, class, worker = route.intake, route.class, route.worker
  if leaving[intake] and leaving[intake][entry] then return GONE end
  local fields = find(intake, entry)
  if not fields then
    leave(intake, entry)
    return GONE
  end
  local is_retry = class == 'retry'
  local here = class .. '/' .. entry
  local known = redis.call('HMGET', ledger, unpack(is_retry and KNOWN_OF_RETRY or KNOWN))
  if known[1] and (known[1] ~= 'waiting' or waits_at(known[2], known[3], known[4]) ~= here) then
    if is_reused(redis.call('HGET', ledger, 'digest'), digest) then return REUSED end
    leave(intake, entry, route.tenant and queued_tokens_of(fields))
    return DUPLICATE
  end
  local target = lane_of(route.lane, worker)
  if target.closed then return CLOSED end
  if target.quarantined or target.load >= (route.alone and 1 or route.most)
    or (route.group and target.tries) then return FULL end

  if charge and route.tenant and is_held(route.tenant) then return HELD end

  local sid = sid_of(known[2], here)
  local attempt = whole(known[5]) + 1
  local placed
  if is_retry then
    placed = redis.call('XADD', route.lane, '*', 'sid', sid, 'attempt', attempt,
      'crashes', whole(known[6]), 'faults', whole(known[7]),
      unpack(lane_fields(fields, known[1], charge, deadline)))
  else
    placed = redis.call('XADD', route.lane, '*', 'sid', sid, 'attempt', attempt,
      unpack(lane_fields(fields, false, charge, deadline)))
  end
  local charged = charge and read_charge(charge)
  redis.call('HSET', ledger, 'state', 'assigned', 'worker', worker, 'attempt', attempt,
    'entry', placed, 't' .. attempt, placed .. ' ' .. worker .. ' ' .. why,
    unpack(charged and {'charge', charge} or NO_CHARGE))
  leave(intake, entry, route.tenant and queued_tokens_of(fields))
  if charged then
    count_charge(charged, sid, attempt)
  elseif is_retry and not charge then
    redis.call('HDEL', ledger, 'charge') -- of an earlier attempt: its end would not settle it
  end
  if not known[1] then
    redis.call('HSET', ledger, 'sid', sid, 'digest', digest)
  elseif not is_retry then
    local size = queued_tokens_of(fields)
    queued = queued + size
    if route.tenant then queued_of_tenants = queued_of_tenants + size end
  end
  target.load = target.load + 1
  if route.alone then
    redis.call('HSET', KEYS[4], worker, placed)
    target.quarantined = true
  elseif route.group then
    route.first, route.size = route.first or placed, (route.size or 0) + 1
  end
  return DISPATCHED
end

local routes = {}
for i = 1, tonumber(ARGV[2]) do
  local k, a = 3 + 2 * i, 4 * i - 1
  routes[i] = {intake = KEYS[k], lane = KEYS[k + 1], class = ARGV[a], worker = ARGV[a + 1],
    most = tonumber(ARGV[a + 2]), alone = ARGV[a + 3] == '1', group = ARGV[a + 3] == '2',
    tenant = ARGV[a]:match(':(.+)')}
end
local first_key, first_arg = 5 + 2 * #routes, 3 + 4 * #routes
local items = #KEYS - first_key + 1
for item = 0, items - 1 do
  local intake = routes[tonumber(ARGV[first_arg + 4 * item])].intake
  wanted[intake] = (wanted[intake] or 0) + 1
end
local charges, deadlines = {}, {}
for a = first_arg + 4 * items, #ARGV, 2 do
  local number = tonumber(ARGV[a])
  if number > 0 then charges[number] = ARGV[a + 1] else deadlines[-number] = ARGV[a + 1] end
end
local replies = {}
for item = 0, items - 1 do
  local a = first_arg + 4 * item
  local route = routes[tonumber(ARGV[a])]
  local charge = charges[item + 1] or route.tenant and '0 1 2 ' .. route.tenant .. ' '
  replies[item + 1] = dispatch(route, KEYS[first_key + item], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3],
    charge, deadlines[item + 1])
end
for _, route in ipairs(routes) do
  if route.first then
    redis.call('HSET', KEYS[4], route.worker, route.first .. '+' .. route.size)
  end
end
sums.write()
local gone_of = {}
for intake, entries in pairs(leaving) do
  leave_intake(intake, entries, entries.size, gone_of)
end
for class, gone in pairs(gone_of) do
  count_of_tenants(KEYS[3], class, -gone)
end
if queued > 0 then count_in(KEYS[3], 'queued_tokens', -queued) end
if queued_of_tenants > 0 then keep_count(KEYS[3], 'tenants_queued_tokens', -queued_of_tenants) end
return replies
