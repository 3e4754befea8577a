#!lua flags=allow-oom
-- Publish the token deltas of one engine step.
--
-- KEYS[1] leases (zset): lease expiry in ms by worker
-- KEYS[2...] for each destination: reply:<client>/<id> or replies:<client> (stream), then for
--   each of its deltas: request:<client>/<id> (hash), tokens:<client>/<id> (string)
-- ARGV[1] the worker
-- ARGV[2] most entries a reply stream keeps, about
-- ARGV[3] how many KEYS say whose tokens are, at the end
-- ARGV[4] the server's time in ms up to which deltas with a + are taken on trust
-- ARGV[5...] for each destination: kind (flat: one entry for each delta; frame: one entry for
--   all), number of deltas, then for each delta: attempt, seq (tokens published before it, with
--   a + where the attempt was compared lately: never of the first), its tokens (packed int32), the reply (msgpack
--   map); behind them all, for each delta of which
--   the ledger keeps something: the field (`epoch` or `cached`), its number from 1, place of its
--   ledger in KEYS, the value; and for each delta of a stream of several choices: `choice`, its
--   number, place of its tokens:<client>#/<id> (string) in KEYS, the byte of its choice. Those
--   stand in KEYS behind all
-- Returns -1 LEASE_LOST, or one code for each delta: 1 PUBLISHED, 2 REPEATED (was published by
--   an earlier call whose answer was lost, or has no tokens), 0 STALE (another attempt has the
--   request, or tokens before it are missing), then the server's time in ms. What is refused because of the lease or of another
--   attempt changes only `refusals` and `refused` of its ledger
-- Atomic, because the fence, the token count and the reply must agree.

-- @include add_replies
-- @include has_lease
-- @include note_refusal
-- @include server_ms

local LEASE_LOST, PUBLISHED, REPEATED, STALE = -1, 1, 2, 0
-- What each delta costs here bounds the yard: so tables and functions are looked up once.
local call, byte, KEYS, ARGV = redis.call, string.byte, KEYS, ARGV
local PLUS = byte('+')
local worker, is_held = ARGV[1], has_lease(KEYS[1], ARGV[1])
local now = server_ms()
local trusts = is_held and now <= tonumber(ARGV[4])

local function note_choice(key, index, seq, packed)
  if tonumber(seq) == 0 then call('DEL', key) end -- of another life of that id
  call('APPEND', key, string.rep(index, #packed / 4))
end

-- Append tokens, unless others than those before them are there. Nearly always they can be appended:
-- so that is tried first, and costs one command.
local function append(tokens, seq, packed)
  if packed == '' then return REPEATED end
  local before = call('APPEND', tokens, packed) - #packed
  if before == 4 * seq then return PUBLISHED end
  if before == 0 then
    call('DEL', tokens)
  else
    call('SET', tokens, call('GETRANGE', tokens, 0, before - 1))
  end
  return 4 * seq + #packed <= before and REPEATED or STALE
end

local function publish(ledger, tokens, attempt, seq, packed)
  if not is_held then
    note_refusal(ledger, worker, attempt, 'tokens')
    return LEASE_LOST
  end
  -- Whoever takes a request from a worker with a lease deletes its tokens, and its id lives again a second
  -- later at the earliest. So tokens that follow those of this attempt need no other proof for so long; the
  -- first tokens follow none, and would be taken where the others were deleted.
  if trusts and byte(seq) == PLUS and seq ~= '+0' and append(tokens, seq, packed) == PUBLISHED then
    return PUBLISHED
  end
  local owner = call('HMGET', ledger, 'worker', 'attempt', 'state')
  if owner[1] ~= worker or owner[2] ~= attempt or owner[3] ~= 'assigned' then
    note_refusal(ledger, worker, attempt, 'tokens')
    return STALE
  end
  return append(tokens, seq, packed)
end

local replies, number, k, a = {}, 0, 2, 5
local places = {} -- of the deltas in ARGV
local last = #KEYS - tonumber(ARGV[3])
while k <= last do
  local destination, kind, count = KEYS[k], ARGV[a], tonumber(ARGV[a + 1])
  local items, published = {}, 0
  k, a = k + 1, a + 2
  for _ = 1, count do
    local code = publish(KEYS[k], KEYS[k + 1], ARGV[a], ARGV[a + 1], ARGV[a + 2])
    if code == PUBLISHED then
      published = published + 1
      items[published] = ARGV[a + 3]
    end
    number = number + 1
    replies[number], places[number] = code, a
    k, a = k + 2, a + 4
  end
  add_replies(destination, kind, items, ARGV[2])
end
if not is_held then return LEASE_LOST end
-- A stream that nobody has gone on with for so long is not taken up again.
local KEEP_S = 24 * 3600
for i = a, #ARGV, 4 do
  local which, key, value = tonumber(ARGV[i + 1]), KEYS[tonumber(ARGV[i + 2])], ARGV[i + 3]
  if replies[which] == PUBLISHED then
    if ARGV[i] == 'choice' then
      local at = places[which]
      note_choice(key, value, ARGV[at + 1], ARGV[at + 2])
      call('EXPIRE', key, KEEP_S)
    else
      call('HSETNX', key, ARGV[i], value)
    end
  end
end
replies[number + 1] = now
return replies
