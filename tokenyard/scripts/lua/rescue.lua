#!lua flags=allow-oom
-- Take back requests of a worker without a lease: a bounded batch of its lane goes to
-- intake:retry, each entry with its published tokens.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] leases (zset): lease expiry in ms by worker; 0 lost, -1 left, -2 crashed
-- KEYS[3] workers (hash): the roster
-- KEYS[4] lane:<worker> (stream)
-- KEYS[5] intake:retry (stream)
-- KEYS[6] quarantine (hash): what is on trial on a lane, by worker
-- KEYS[7] departed (hash): why a worker is gone, by worker
-- KEYS[8...] for each entry: request:<client>/<id> (hash), tokens:<client>/<id> (string),
--   tokens:<client>#/<id> (string): whose those are
-- ARGV[1] the caller's leader token
-- ARGV[2] the worker
-- ARGV[3] its base model ('': not known)
-- ARGV[4...] for each entry to move, in the order of KEYS: its id, and for a worker that crashed
--   the most suspects of its next trial, including itself (0: it must run alone), or '' where it
--   is not a suspect of this crash
-- Returns -1 NOT_LEADER, -2 HELD (the lease runs; nothing was touched), or the number of
--   entries left on the lane; at 0 the worker is removed. A call without entries only ends
--   the lease, after which only the rescuer can change the lane.
-- Atomic, because a request must be on the lane or in the intake at every moment, and the dead
-- worker's late writes must be refused from now on.

-- @include back_fields
-- @include count_up
-- @include give_back
-- @include server_ms
-- @include whole

local NOT_LEADER, HELD = -1, -2
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
local worker, lane = ARGV[2], KEYS[4]
local lease = tonumber(redis.call('ZSCORE', KEYS[2], worker) or '0')
if lease > server_ms() then return HELD end
if lease > 0 then
  lease = 0
  redis.call('ZADD', KEYS[2], 0, worker)
end

local WHY = {['0'] = 'lost', ['-1'] = 'left', ['-2'] = 'crashed'}
local why = WHY[tostring(lease)]
local reason = redis.call('HGET', KEYS[7], worker) or 'its lease ran out'
local alone = redis.call('HGET', KEYS[6], worker)

-- Note this departure in the ledger of a request. The coordinator reads there whether the request
-- may have caused it.
local function note(ledger, entry, trial)
  redis.call('HDEL', ledger, 'not_before')
  if why == 'left' or (why == 'crashed' and trial == '') then return end
  count_up(ledger, 'crashes')
  redis.call('HSET', ledger, 'reason', reason)
  if alone == entry then count_up(ledger, why .. '_alone') end
  if why == 'crashed' then
    -- Suspected before and on no trial since: it was acquitted, perhaps too soon.
    local known = redis.call('HMGET', ledger, 'suspected', 'trial')
    if known[1] and not known[2] then count_up(ledger, 'relapsed') end
    count_up(ledger, 'suspected')
    redis.call('HSET', ledger, 'trial', trial)
  end
end

local function take_back(entry, trial, ledger, tokens, choices)
  local found = redis.call('XRANGE', lane, entry, entry)[1]
  if not found then return end
  redis.call('XDEL', lane, entry)
  local owner = redis.call('HMGET', ledger, 'worker', 'state', 'entry', 'attempt')
  if owner[1] ~= worker or owner[2] ~= 'assigned' or owner[3] ~= entry then return end
  note(ledger, entry, trial)
  local back = redis.call('XADD', KEYS[5], '*',
    unpack(back_fields(found[2], ledger, tokens, choices, ARGV[3])))
  redis.call('HSET', ledger, 'state', 'waiting', 'intake', 'retry', 'entry', back,
    'r' .. whole(owner[4]), server_ms() .. ' ' .. worker .. ' ' .. why .. ' ' .. reason)
  redis.call('HDEL', ledger, 'worker')
  give_back(ledger)
end

for i = 4, #ARGV, 2 do
  local k = 8 + (i - 4) / 2 * 3
  take_back(ARGV[i], ARGV[i + 1], KEYS[k], KEYS[k + 1], KEYS[k + 2])
end

local rest = redis.call('XLEN', lane)
if rest == 0 then
  redis.call('ZREM', KEYS[2], worker)
  redis.call('HDEL', KEYS[3], worker)
  redis.call('DEL', lane)
  redis.call('HDEL', KEYS[6], worker)
  redis.call('HDEL', KEYS[7], worker)
end
return rest
