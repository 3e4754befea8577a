#!lua flags=allow-oom
-- Give a waiting request its result without running it (invalid, expired, out of attempts).
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] intake:<class> (stream)
-- KEYS[3] request:<client>/<id> (hash)
-- KEYS[4] tokens:<client>/<id> (string)
-- KEYS[5] reply:<client>/<id> or replies:<client> (stream)
-- KEYS[6] info (hash)
-- KEYS[7] dead (stream)
-- ARGV[1] the caller's leader token
-- ARGV[2] the intake's consumer group
-- ARGV[3] priority class
-- ARGV[4] entry id
-- ARGV[5] kind of destination: flat or frame
-- ARGV[6] status
-- ARGV[7] time to live in s
-- ARGV[8] most entries a reply stream keeps, about
-- ARGV[9] the reply (msgpack map)
-- ARGV[10] why the request is also kept among the dead letters, or '' if it is not
-- ARGV[11] most dead letters kept, about
-- Returns -1 NOT_LEADER, 1 ANSWERED, 2 DUPLICATE (dropped: the id is known otherwise),
--   5 GONE (nobody waits there any more)
-- Atomic, because the result must appear exactly when the request stops waiting.

-- @include add_replies
-- @include keep_for
-- @include leave_intake
-- @include server_ms
-- @include take_queued
-- @include to_dead_letters

local NOT_LEADER, ANSWERED, DUPLICATE, GONE = -1, 1, 2, 5
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
local intake, ledger, entry, item = KEYS[2], KEYS[3], ARGV[4], ARGV[9]

local waits = redis.call('XRANGE', intake, entry, entry)[1]
leave_intake(intake, ARGV[2], {entry})
if not waits then return GONE end
local known = redis.call('HMGET', ledger, 'state', 'intake', 'entry')
if known[1] and (known[1] ~= 'waiting' or known[2] ~= ARGV[3] or known[3] ~= entry) then
  return DUPLICATE
end

take_queued(KEYS[6], ledger)
redis.call('HSET', ledger, 'state', ARGV[6], 'result', item, 'ended', server_ms())
redis.call('HSETNX', ledger, 'sid', ARGV[3] .. '/' .. entry)
redis.call('EXPIRE', ledger, ARGV[7])
redis.call('DEL', KEYS[4])
add_replies(KEYS[5], ARGV[5], {item}, ARGV[8])
keep_for(KEYS[5], ARGV[7])
if ARGV[10] ~= '' then
  to_dead_letters(KEYS[7], ARGV[11], waits[2], ARGV[10], redis.call('HGET', ledger, 'sid'))
end
return ANSWERED
