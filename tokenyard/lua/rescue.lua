#!lua flags=allow-oom
-- Take back what a worker without a lease holds: a bounded batch of its lane goes to
-- intake:retry, each entry with the tokens that its readers have already seen.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] leases (zset): lease expiry in ms by worker; 0 lost, -1 left
-- KEYS[3] workers (hash): the roster
-- KEYS[4] lane:<worker> (stream)
-- KEYS[5] intake:retry (stream)
-- KEYS[6...] for each entry: request:<client>/<id> (hash), tokens:<client>/<id> (string)
-- ARGV[1] the caller's leader token
-- ARGV[2] the worker
-- ARGV[3...] the entry ids to move, in the order of KEYS
-- Returns -1 NOT_LEADER, -2 HELD (the lease runs; nothing was touched), or the number of
--   entries left on the lane; at 0 the worker is forgotten. A call without entries only ends
--   the lease, after which nobody but the rescuer can change the lane.
-- Atomic, because a request must be on the lane or in the intake at every moment, and the dead
-- worker's late writes must be refused from this moment on.

-- @include server_ms

local NOT_LEADER, HELD = -1, -2
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
local worker, lane = ARGV[2], KEYS[4]
local lease = tonumber(redis.call('ZSCORE', KEYS[2], worker) or '0')
if lease > server_ms() then return HELD end
if lease > 0 then
  lease = 0
  redis.call('ZADD', KEYS[2], 0, worker)
end

local function take_back(entry, ledger, tokens)
  local found = redis.call('XRANGE', lane, entry, entry)[1]
  if not found then return end
  redis.call('XDEL', lane, entry)
  local owner = redis.call('HMGET', ledger, 'worker', 'state', 'entry')
  if owner[1] ~= worker or owner[2] ~= 'assigned' or owner[3] ~= entry then return end
  local crashes = redis.call('HGET', ledger, 'crashes') or '0'
  if lease == 0 then crashes = redis.call('HINCRBY', ledger, 'crashes', 1) end
  local fields = {'crashes', crashes}
  for i = 1, #found[2], 2 do
    if found[2][i] ~= 'published' and found[2][i] ~= 'crashes' then
      fields[#fields + 1] = found[2][i]
      fields[#fields + 1] = found[2][i + 1]
    end
  end
  local published = redis.call('GET', tokens)
  if published then
    fields[#fields + 1] = 'published'
    fields[#fields + 1] = published
  end
  local back = redis.call('XADD', KEYS[5], '*', unpack(fields))
  redis.call('HSET', ledger, 'state', 'waiting', 'intake', 'retry', 'entry', back)
  redis.call('HDEL', ledger, 'worker')
end

for i = 3, #ARGV do
  local k = 6 + (i - 3) * 2
  take_back(ARGV[i], KEYS[k], KEYS[k + 1])
end

local rest = redis.call('XLEN', lane)
if rest == 0 then
  redis.call('ZREM', KEYS[2], worker)
  redis.call('HDEL', KEYS[3], worker)
  redis.call('DEL', lane)
end
return rest
