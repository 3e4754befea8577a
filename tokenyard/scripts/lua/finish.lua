#!lua flags=allow-oom
-- Publish the results of one engine step and free their places on the lane.
--
-- KEYS[1] leases (zset): lease expiry in ms by worker
-- KEYS[2] lane:<worker> (stream)
-- KEYS[3] capacity (stream)
-- KEYS[4] quarantine (hash): the entry that runs alone, by worker
-- KEYS[5...] for each destination: reply:<client>/<id> or replies:<client> (stream), then for
--   each of its results: request:<client>/<id> (hash), and tokens:<client>/<id> (string) of those
--   that may have published any, and tokens:<client>#/<id> (string) of those of several choices
-- ARGV[1] the worker
-- ARGV[2] most entries a reply stream keeps, about
-- ARGV[3] tokens of all of them, in and out, for policies that weigh them
-- ARGV[4...] for each destination: kind (flat or frame), number of results, then for each
--   result: lane entry, attempt, status, time to live in s, the reply (msgpack map), 1 if it may
--   have published tokens, 2 if of several choices (else 0), and 4 more if it is charged to a tenant:
--   then tokens in, those of them that were cached, tokens out, the code of its error ('': none). The
--   names of the tenant's keys follow from that of the ledger
-- Returns -1 LEASE_LOST, or one code for each result: 1 FINISHED, 2 REPEATED (was finished by
--   an earlier call whose answer was lost, or was cancelled: then it has now paid what it had used),
--   0 STALE (another attempt has the request). What is
--   refused changes only `refusals` and `refused` of its ledger
-- Atomic, because the first valid writer of a result must be the only one.

-- @include add_replies
-- @include end_cancelled
-- @include end_charge
-- @include has_lease
-- @include keep_for
-- @include media_of
-- @include note_refusal
-- @include prefix_of
-- @include server_ms
-- @include tenant_sums

local LEASE_LOST, FINISHED, REPEATED, STALE = -1, 1, 2, 0
-- Lua cannot unpack thousands of values at once.
local MOST_UNPACKED = 1000
local is_held = has_lease(KEYS[1], ARGV[1])

local now = server_ms()
-- Places on the lane and published tokens that nobody needs any more: given up at the end.
local places, forgotten = {}, {}

local function finish(ledger, tokens, choices, entry, attempt, status, ttl, item)
  if not is_held then
    note_refusal(ledger, ARGV[1], attempt, 'result')
    return LEASE_LOST
  end
  local owner = redis.call('HMGET', ledger, 'worker', 'attempt', 'state', 'entry', 'media')
  if owner[1] ~= ARGV[1] or owner[2] ~= attempt then
    -- Nobody waits for it here any more, so it must not take up a place.
    if owner[1] ~= ARGV[1] or owner[4] ~= entry then places[#places + 1] = entry end
    note_refusal(ledger, ARGV[1], attempt, 'result')
    return STALE
  end
  if owner[3] ~= 'assigned' then return REPEATED end
  redis.call('HSET', ledger, 'state', status, 'result', item, 'ended', now)
  redis.call('EXPIRE', ledger, ttl)
  if tokens then forgotten[#forgotten + 1] = tokens end
  if choices then forgotten[#forgotten + 1] = choices end
  if owner[5] then redis.call('DEL', media_of(ledger)) end
  places[#places + 1] = entry
  return FINISHED
end

local sums = tenant_sums(prefix_of(KEYS[1]))
local replies, freed, k, a = {}, 0, 5, 4
while k <= #KEYS do
  local destination, kind, count = KEYS[k], ARGV[a], tonumber(ARGV[a + 1])
  local items, longest = {}, 0
  k, a = k + 1, a + 2
  for _ = 1, count do
    local strings = tonumber(ARGV[a + 5])
    local charged = strings > 3
    if charged then strings = strings - 4 end
    local used = charged and {input = tonumber(ARGV[a + 6]), cached = tonumber(ARGV[a + 7]),
      output = tonumber(ARGV[a + 8]), code = ARGV[a + 9]}
    local code = finish(KEYS[k], strings > 0 and KEYS[k + 1], strings > 1 and KEYS[k + 2],
      ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4])
    if code == FINISHED then
      items[#items + 1] = ARGV[a + 4]
      longest = math.max(longest, tonumber(ARGV[a + 3]))
      freed = freed + 1
      if used then end_charge(KEYS[k], ARGV[a + 2], used, nil, sums) end
    elseif used and code == REPEATED then
      end_cancelled(sums, KEYS[k], ARGV[1], ARGV[a], used) -- if a cancel was faster
    end
    replies[#replies + 1] = code
    k, a = k + 1 + strings, a + (charged and 10 or 6)
  end
  if #items > 0 then
    add_replies(destination, kind, items, ARGV[2])
    keep_for(destination, longest)
  end
end
if not is_held then return LEASE_LOST end
sums.write()
local alone = #places > 0 and redis.call('HGET', KEYS[4], ARGV[1])
for first = 1, #places, MOST_UNPACKED do
  local last = math.min(first + MOST_UNPACKED - 1, #places)
  redis.call('XDEL', KEYS[2], unpack(places, first, last))
end
for first = 1, #forgotten, MOST_UNPACKED do
  local last = math.min(first + MOST_UNPACKED - 1, #forgotten)
  redis.call('DEL', unpack(forgotten, first, last))
end
for _, entry in ipairs(places) do
  if entry == alone then redis.call('HDEL', KEYS[4], ARGV[1]) end
end
if freed > 0 then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'event', 'capacity', 'worker', ARGV[1],
    'count', freed, 'work', ARGV[3])
end
return replies
