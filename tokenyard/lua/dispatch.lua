#!lua flags=allow-oom
-- Move intake entries onto lanes, one hand-over for each, all of one round in one call.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] leases (zset): lease expiry in ms by worker
-- KEYS[3] info (hash)
-- KEYS[4] quarantine (hash): the entry that runs alone, by worker
-- KEYS[5...] for each item: intake:<class> (stream), lane:<worker> (stream),
--   request:<client>/<id> (hash)
-- ARGV[1] the caller's leader token
-- ARGV[2] the intake's consumer group
-- ARGV[3...] for each item: priority class, entry id, worker, most entries on that lane, 1 if it
--   must be alone there (else 0), why there (words, for the record)
-- Returns -1 NOT_LEADER, or one code for each item: 1 DISPATCHED, 2 DUPLICATE (dropped),
--   3 CLOSED (the worker's lease is gone; the entry stays), 4 FULL (the lane is; the entry
--   stays), 5 GONE (nobody waits there any more)
-- Atomic, because the entry must be in the intake or on the lane at every moment, and because
-- a deposed leader must move nothing.

-- @include has_lease
-- @include leave_intake

local NOT_LEADER, DISPATCHED, DUPLICATE, CLOSED, FULL, GONE = -1, 1, 2, 3, 4, 5
-- Fields that only the system writes: a client's own are dropped here.
local SYSTEM = {sid = true, attempt = true, crashes = true, suspected = true, crashed_alone = true,
  lost_alone = true, faults = true, reason = true, not_before = true, published = true,
  epoch = true}
-- And those of them that go on with a retry.
local CARRIED = {published = true, epoch = true}
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
local function lane_fields(fields, is_retry)
  if is_plain(fields) then return fields end
  local out, place = {}, {}
  for i = 1, #fields, 2 do
    local name = fields[i]
    if not SYSTEM[name] or (is_retry and CARRIED[name]) then
      if not place[name] and #out < MOST_VALUES then
        place[name] = #out + 2
        out[#out + 1] = name
      end
      if place[name] then out[place[name]] = fields[i + 1] end
    end
  end
  return out
end

-- The room on a lane, looked up once for each; only this script adds requests to a lane.
local lanes = {}
local function lane_of(lane, worker)
  if not lanes[worker] then
    local load = redis.call('XLEN', lane)
    lanes[worker] = {
      closed = not has_lease(KEYS[2], worker),
      load = load,
      quarantined = load > 0 and redis.call('HEXISTS', KEYS[4], worker) == 1,
    }
  end
  return lanes[worker]
end

-- What leaves the intakes, by intake, taken out at the end in one go: until then the server still
-- shows it there. And the queued tokens that go with it, as `submit` counted them.
local leaving, queued = {}, 0
local function leave(intake, entry)
  local list = leaving[intake] or {}
  leaving[intake] = list
  list[#list + 1], list[entry] = entry, true
end

local function dispatch(intake, lane, ledger, class, entry, worker, most, alone, why)
  if leaving[intake] and leaving[intake][entry] then return GONE end
  local found = redis.call('XRANGE', intake, entry, entry)[1]
  if not found then
    leave(intake, entry)
    return GONE
  end
  local known = redis.call('HMGET', ledger, 'state', 'intake', 'entry', 'sid', 'attempt', 'crashes',
    'faults', 'queued_tokens')
  if known[1] and (known[1] ~= 'waiting' or known[2] ~= class or known[3] ~= entry) then
    leave(intake, entry)
    return DUPLICATE
  end
  local target = lane_of(lane, worker)
  if target.closed then return CLOSED end
  if target.quarantined or target.load >= (alone == '1' and 1 or tonumber(most)) then
    return FULL
  end

  local sid = known[4] or (class .. '/' .. entry)
  local attempt = tonumber(known[5] or '0') + 1
  local placed = redis.call('XADD', lane, '*', 'sid', sid, 'attempt', attempt,
    'crashes', known[6] or '0', 'faults', known[7] or '0',
    unpack(lane_fields(found[2], class == 'retry' and known[1])))
  redis.call('HSET', ledger, 'state', 'assigned', 'sid', sid, 'worker', worker,
    'attempt', attempt, 'entry', placed, 'queued_tokens', 0,
    't' .. attempt, placed .. ' ' .. worker .. ' ' .. why)
  leave(intake, entry)
  queued = queued + tonumber(known[8] or '0')
  target.load = target.load + 1
  if alone == '1' then
    redis.call('HSET', KEYS[4], worker, placed)
    target.quarantined = true
  end
  return DISPATCHED
end

local replies = {}
for item = 0, (#KEYS - 4) / 3 - 1 do
  local k, a = 5 + item * 3, 3 + item * 6
  replies[item + 1] = dispatch(KEYS[k], KEYS[k + 1], KEYS[k + 2],
    ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4], ARGV[a + 5])
end
for intake, entries in pairs(leaving) do leave_intake(intake, ARGV[2], entries) end
if queued > 0 then redis.call('HINCRBY', KEYS[3], 'queued_tokens', -queued) end
return replies
