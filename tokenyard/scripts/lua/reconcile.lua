#!lua flags=allow-oom
-- End requests whose entry was deleted from an intake or a lane by hand, as failed, and correct the
-- count of waiting tokens.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] info (hash)
-- KEYS[3] leases (zset): lease expiry in ms by worker
-- KEYS[4] quarantine (hash): the entry that runs alone, by worker
-- KEYS[5] tally (hash): counters
-- KEYS[6...] for each request: request:<client>/<id> (hash), tokens:<client>/<id> (string),
--   intake:<intake> or lane:<worker> (stream) where the caller missed it (any where
--   its ledger names no place), reply:<client>/<id> (stream), replies:<client> (stream)
-- ARGV[1] the caller's leader token
-- ARGV[2] the excess of the count of waiting tokens
-- ARGV[3] time to live of a result in s
-- ARGV[4] most entries a reply stream keeps, about
-- ARGV[5] number of fields of info that follow: the report of the caller's scan
-- ARGV[6...] these fields and their values; then for each request: its id, state, intake or worker
--   and entry as the caller has read them, the error (JSON)
-- Returns -1 NOT_LEADER, or one code for each request: 1 ENDED, 0 STAYS (its entry is there, or
--   it has moved since)
-- Atomic, because a request that is moving must not be treated as lost.

-- @include add_replies
-- @include counted
-- @include end_charge
-- @include end_quarantine
-- @include entry_at
-- @include has_lease
-- @include keep_for
-- @include leave_intake
-- @include media_of
-- @include pack_result
-- @include place_of
-- @include recount_intakes
-- @include server_ms
-- @include tenant_of

local NOT_LEADER, ENDED, STAYS = -1, 1, 0
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end

local function is_as_seen(ledger, place, state, where, entry)
  local known = redis.call('HMGET', ledger, 'state', 'sid', 'intake', 'entry', 'worker')
  local where_now, entry_now = place_of(known)
  if known[1] ~= state or where_now ~= where or entry_now ~= entry then return false end
  return where == '' or not entry_at(place, entry)
end

-- Only the entry had the reply stream, so the result goes to both.
local function publish(result, flat, framed)
  for kind, destination in pairs({flat = flat, frame = framed}) do
    add_replies(destination, kind, {result}, ARGV[4])
    keep_for(destination, ARGV[3])
  end
end

local fields = 2 * ARGV[5]
if fields > 0 then redis.call('HSET', KEYS[2], unpack(ARGV, 6, 5 + fields)) end
local replies = {}
for k = 6, #KEYS, 5 do
  local ledger, tokens, place, a = KEYS[k], KEYS[k + 1], KEYS[k + 2], k + fields
  local id, state, where, entry = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3]
  if is_as_seen(ledger, place, state, where, entry) then
    local published = redis.call('GET', tokens) or ''
    local result = pack_result(id, 'failed', published, ARGV[a + 4])
    redis.call('HSET', ledger, 'state', 'failed', 'result', result, 'ended', server_ms())
    redis.call('EXPIRE', ledger, ARGV[3])
    redis.call('DEL', tokens)
    redis.call('DEL', media_of(ledger)) -- a user may have another right for it
    -- What came in is gone with the entry.
    end_charge(ledger, 'failed', {input = 0, output = #published / 4, code = 'ENTRY_LOST'},
      state == 'waiting' and place)
    if state == 'waiting' and where ~= '' then
      leave_intake(place, {entry}) -- which may be empty now
      local prefix, _, tenant = tenant_of(place)
      if tenant then recount_intakes(prefix, tenant) end
    elseif state == 'assigned' and has_lease(KEYS[3], where) then
      redis.call('XADD', place, '*', 'cancel', entry)
      end_quarantine(KEYS[4], where, entry)
    end
    publish(result, KEYS[k + 3], KEYS[k + 4])
    replies[#replies + 1] = ENDED
  else
    replies[#replies + 1] = STAYS
  end
end
if ARGV[2] ~= '0' then
  local count = counted(KEYS[5], 'queued_tokens') - ARGV[2]
  redis.call('HSET', KEYS[5], 'queued_tokens', math.max(0, count))
end
return replies
