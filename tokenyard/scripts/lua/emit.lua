#!lua flags=allow-oom
-- Publish the token deltas of one engine step.
--
-- KEYS[1] leases (zset): lease expiry in ms by worker
-- KEYS[2...] for each destination: reply:<client>/<id> or replies:<client> (stream), then for
--   each of its deltas: request:<client>/<id> (hash), tokens:<client>/<id> (string)
-- ARGV[1] the worker
-- ARGV[2] most entries a reply stream keeps, about
-- ARGV[3] how many KEYS say whose tokens are, at the end
-- ARGV[4...] for each destination: kind (flat: one entry for each delta; frame: one entry for
--   all), number of deltas, then for each delta: attempt, seq (tokens published before it),
--   its tokens (packed int32), the reply (msgpack map); behind them all, for each delta of which
--   the ledger keeps something: the field (`epoch` or `cached`), its number from 1, place of its
--   ledger in KEYS, the value; and for each delta of a stream of several choices: `choice`, its
--   number, place of its tokens:<client>#/<id> (string) in KEYS, the byte of its choice. Those
--   stand in KEYS behind all
-- Returns -1 LEASE_LOST, or one code for each delta: 1 PUBLISHED, 2 REPEATED (was published by
--   an earlier call whose answer was lost, or has no tokens), 0 STALE (another attempt has the
--   request, or tokens before it are missing). What is refused because of the lease or of another
--   attempt changes only `refusals` and `refused` of its ledger
-- Atomic, because the fence, the token count and the reply must agree.

-- @include add_replies
-- @include has_lease
-- @include note_refusal

local LEASE_LOST, PUBLISHED, REPEATED, STALE = -1, 1, 2, 0
local is_held = has_lease(KEYS[1], ARGV[1])

-- Of each delta: how many tokens were published before it, and how many it has.
local spans = {}
local function note_choice(key, index, span)
  if span[1] == 0 then redis.call('DEL', key) end -- of another life of that id
  redis.call('APPEND', key, string.rep(index, span[2]))
end

-- Append tokens, unless others than those before them are there. Nearly always they can be appended:
-- so that is tried first, and costs one command.
local function append(tokens, seq, packed)
  if packed == '' then return REPEATED end
  local before = redis.call('APPEND', tokens, packed) - #packed
  if before == 4 * seq then return PUBLISHED end
  if before == 0 then
    redis.call('DEL', tokens)
  else
    redis.call('SET', tokens, redis.call('GETRANGE', tokens, 0, before - 1))
  end
  return 4 * seq + #packed <= before and REPEATED or STALE
end

local function publish(ledger, tokens, attempt, seq, packed)
  if not is_held then
    note_refusal(ledger, ARGV[1], attempt, 'tokens')
    return LEASE_LOST
  end
  local owner = redis.call('HMGET', ledger, 'worker', 'attempt', 'state')
  if owner[1] ~= ARGV[1] or owner[2] ~= attempt or owner[3] ~= 'assigned' then
    note_refusal(ledger, ARGV[1], attempt, 'tokens')
    return STALE
  end
  return append(tokens, tonumber(seq), packed)
end

local replies, k, a = {}, 2, 4
local last = #KEYS - tonumber(ARGV[3])
while k <= last do
  local destination, kind, count = KEYS[k], ARGV[a], tonumber(ARGV[a + 1])
  local items = {}
  k, a = k + 1, a + 2
  for _ = 1, count do
    local code = publish(KEYS[k], KEYS[k + 1], ARGV[a], ARGV[a + 1], ARGV[a + 2])
    if code == PUBLISHED then items[#items + 1] = ARGV[a + 3] end
    replies[#replies + 1] = code
    if last < #KEYS then spans[#replies] = {tonumber(ARGV[a + 1]), #ARGV[a + 2] / 4} end
    k, a = k + 2, a + 4
  end
  add_replies(destination, kind, items, ARGV[2])
end
if not is_held then return LEASE_LOST end
-- A stream that nobody has gone on with for so long is not taken up again.
local KEEP_S = 24 * 3600
for i = a, #ARGV, 4 do
  local number, key, value = tonumber(ARGV[i + 1]), KEYS[tonumber(ARGV[i + 2])], ARGV[i + 3]
  if replies[number] == PUBLISHED then
    if ARGV[i] == 'choice' then
      note_choice(key, value, spans[number])
      redis.call('EXPIRE', key, KEEP_S)
    else
      redis.call('HSETNX', key, ARGV[i], value)
    end
  end
end
return replies
