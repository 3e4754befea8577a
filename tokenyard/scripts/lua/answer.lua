#!lua flags=allow-oom
-- Give a waiting request its result without running it (invalid, expired, out of attempts).
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] intake:<intake> (stream)
-- KEYS[3] request:<client>/<id> (hash)
-- KEYS[4] tokens:<client>/<id> (string)
-- KEYS[5] reply:<client>/<id> or replies:<client> (stream)
-- KEYS[6] tally (hash)
-- KEYS[7] dead (stream)
-- ARGV[1] the caller's leader token
-- ARGV[2] the intake's name
-- ARGV[3] entry id
-- ARGV[4] kind of destination: flat or frame
-- ARGV[5] status
-- ARGV[6] time to live in s
-- ARGV[7] most entries a reply stream keeps, about
-- ARGV[8] the reply (msgpack map)
-- ARGV[9] why the request is also kept among the dead letters, or '' if it is not
-- ARGV[10] most dead letters kept, about
-- ARGV[11] the digest of the request ('': not to be compared)
-- ARGV[12] why a request that reuses an id is a dead letter
-- ARGV[13] the code of its error
-- ARGV[14] what the submitter of a request that reuses an id is told on the reply stream (msgpack map)
-- Returns -1 NOT_LEADER, 1 ANSWERED, 2 DUPLICATE (dropped: the id is known otherwise),
--   5 GONE (it does not wait there any more), 6 REUSED (now a dead letter: the id is known with
--   another digest)
-- Atomic, because the result must appear exactly when the request stops waiting.

-- @include add_replies
-- @include end_charge
-- @include is_reused
-- @include keep_for
-- @include leave_intake
-- @include media_of
-- @include queue_tokens
-- @include queued_tokens_of
-- @include server_ms
-- @include sid_of
-- @include to_dead_letters
-- @include waits_at

local NOT_LEADER, ANSWERED, DUPLICATE, GONE, REUSED = -1, 1, 2, 5, 6
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
local intake, ledger, entry, item, digest = KEYS[2], KEYS[3], ARGV[3], ARGV[8], ARGV[11]

local waits = redis.call('XRANGE', intake, entry, entry)[1]
leave_intake(intake, {entry}, waits and queued_tokens_of(waits[2]))
if not waits then return GONE end
local here = ARGV[2] .. '/' .. entry
local known = redis.call('HMGET', ledger, 'state', 'sid', 'intake', 'entry', 'digest')
if known[1] and (known[1] ~= 'waiting' or waits_at(known[2], known[3], known[4]) ~= here) then
  if not is_reused(known[5], digest) then return DUPLICATE end
  to_dead_letters(KEYS[7], ARGV[10], waits[2], ARGV[12], here)
  local is_new = redis.call('TTL', KEYS[5]) == -2 -- else it lives as the first request wants
  add_replies(KEYS[5], ARGV[4], {ARGV[14]}, ARGV[7])
  if is_new then keep_for(KEYS[5], ARGV[6]) end
  return REUSED
end
if known[1] and ARGV[2] ~= 'retry' then
  queue_tokens(KEYS[6], intake, -queued_tokens_of(waits[2]))
end
local sid = sid_of(known[2], here)
local output = redis.call('STRLEN', KEYS[4]) / 4
end_charge(ledger, ARGV[5], {input = output > 0 and queued_tokens_of(waits[2]) or 0,
  output = output, code = ARGV[13]}, intake)

redis.call('HSET', ledger, 'state', ARGV[5], 'sid', sid, 'result', item, 'ended', server_ms())
if not known[1] then redis.call('HSET', ledger, 'digest', digest) end
redis.call('EXPIRE', ledger, ARGV[6])
redis.call('DEL', KEYS[4])
add_replies(KEYS[5], ARGV[4], {item}, ARGV[7])
keep_for(KEYS[5], ARGV[6])
if ARGV[9] == '' then
  redis.call('DEL', media_of(ledger))
else -- its media stay for a while: it may be queued again
  to_dead_letters(KEYS[7], ARGV[10], waits[2], ARGV[9], sid)
end
return ANSWERED
