-- Accept a burst of requests of one priority class, each at most once.
--
-- KEYS[1] info (hash): limits, written by the leader
-- KEYS[2] intake:high (stream)
-- KEYS[3] intake:normal (stream)
-- KEYS[4] intake:low (stream)
-- KEYS[5] intake:retry (stream)
-- KEYS[6...] request:<client>/<id> (hash), one for each request
-- ARGV[1] priority class: high, normal or low
-- ARGV[2...] for each request: number of field arguments, then field, value, ...
-- Returns one pair for each request: {1, server id} ACCEPTED, {2, state} KNOWN,
--   {0, retry after in ms} FULL
-- Atomic, because two submitters of one id must not both find it unknown.
-- Without `allow-oom`, which all other scripts have: a server without memory refuses new
-- requests, and what it has accepted still ends and gives memory back.

local ACCEPTED, KNOWN, FULL = 1, 2, 0
local RETRY_AFTER_MS = 1000
local class = ARGV[1]
local intake = ({high = KEYS[2], normal = KEYS[3], low = KEYS[4]})[class]

local waiting = 0
for i = 2, 5 do waiting = waiting + redis.call('XLEN', KEYS[i]) end
local bound = tonumber(redis.call('HGET', KEYS[1], 'max_num_queued_reqs') or '0')

local replies, at = {}, 2
for i = 6, #KEYS do
  local ledger, count = KEYS[i], tonumber(ARGV[at])
  local state = redis.call('HGET', ledger, 'state')
  if state then
    replies[#replies + 1] = {KNOWN, state}
  elseif bound > 0 and waiting >= bound then
    replies[#replies + 1] = {FULL, RETRY_AFTER_MS}
  else
    local entry = redis.call('XADD', intake, '*', unpack(ARGV, at + 1, at + count))
    local sid = class .. '/' .. entry
    redis.call('HSET', ledger, 'state', 'waiting', 'sid', sid, 'intake', class, 'entry', entry)
    waiting = waiting + 1
    replies[#replies + 1] = {ACCEPTED, sid}
  end
  at = at + 1 + count
end
return replies
