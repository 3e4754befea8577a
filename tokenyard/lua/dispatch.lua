-- Move intake entries onto lanes, one hand-over for each, all of one round in one call.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] leases (zset): lease expiry in ms by worker
-- KEYS[3...] for each item: intake:<class> (stream), lane:<worker> (stream),
--   request:<client>/<id> (hash)
-- ARGV[1] the caller's leader token
-- ARGV[2] the intake's consumer group
-- ARGV[3...] for each item: priority class, entry id, worker, most entries on that lane
-- Returns -1 NOT_LEADER, or one code for each item: 1 DISPATCHED, 2 DUPLICATE (dropped),
--   3 CLOSED (the worker's lease is gone; the entry stays), 4 FULL (the lane is; the entry
--   stays), 5 GONE (nobody waits there any more)
-- Atomic, because the entry must be in the intake or on the lane at every moment, and because
-- a deposed leader must move nothing.

-- @include has_lease

local NOT_LEADER, DISPATCHED, DUPLICATE, CLOSED, FULL, GONE = -1, 1, 2, 3, 4, 5
-- Fields that only the system writes: a client's own are dropped here.
local SYSTEM = {sid = true, attempt = true, crashes = true, published = true}

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end

local function remove(intake, entry)
  redis.call('XACK', intake, ARGV[2], entry)
  redis.call('XDEL', intake, entry)
end

local function lane_fields(fields, class, sid, attempt, crashes)
  local out = {}
  for i = 1, #fields, 2 do
    local name = fields[i]
    if not SYSTEM[name] or (class == 'retry' and name == 'published') then
      out[#out + 1] = name
      out[#out + 1] = fields[i + 1]
    end
  end
  for _, value in ipairs({'sid', sid, 'attempt', attempt, 'crashes', crashes}) do
    out[#out + 1] = value
  end
  return out
end

local function dispatch(intake, lane, ledger, class, entry, worker, most)
  local found = redis.call('XRANGE', intake, entry, entry)[1]
  local known = redis.call('HMGET', ledger, 'state', 'intake', 'entry', 'sid', 'attempt', 'crashes')
  if not found then
    redis.call('XACK', intake, ARGV[2], entry)
    return GONE
  end
  if known[1] and (known[1] ~= 'waiting' or known[2] ~= class or known[3] ~= entry) then
    remove(intake, entry)
    return DUPLICATE
  end
  if not has_lease(KEYS[2], worker) then return CLOSED end
  if redis.call('XLEN', lane) >= tonumber(most) then return FULL end

  local sid = known[4] or (class .. '/' .. entry)
  local attempt = tonumber(known[5] or '0') + 1
  local fields = lane_fields(found[2], class, sid, attempt, known[6] or '0')
  local placed = redis.call('XADD', lane, '*', unpack(fields))
  redis.call('HSET', ledger, 'state', 'assigned', 'sid', sid, 'worker', worker,
    'attempt', attempt, 'entry', placed)
  remove(intake, entry)
  return DISPATCHED
end

local replies = {}
for item = 0, (#KEYS - 2) / 3 - 1 do
  local k, a = 3 + item * 3, 3 + item * 4
  replies[item + 1] = dispatch(KEYS[k], KEYS[k + 1], KEYS[k + 2],
    ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3])
end
return replies
