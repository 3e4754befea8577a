-- Queue a dead letter again, as if it had just been submitted.
--
-- KEYS[1] dead (stream)
-- KEYS[2] intake:<intake> (stream)
-- KEYS[3] request:<client>/<id> (hash)
-- KEYS[4] tokens:<client>/<id> (string)
-- KEYS[5] reply:<client>/<id> (stream)
-- KEYS[6] tally (hash)
-- ARGV[1] the dead letter's entry
-- ARGV[2] the intake's name
-- Returns the new server id, or '' if there is no such letter, if its id is in flight, or if it is
--   a letter because its id is known with another request, whose result is still there
-- Atomic, because the letter must be dead or waiting at every moment.

-- @include enter_intake
-- @include queue_tokens
-- @include queued_tokens_of
-- @include tenant_of

local letter = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not letter then return '' end
local known = redis.call('HMGET', KEYS[3], 'state', 'attempt', 'digest')
if known[1] == 'waiting' or known[1] == 'assigned' then return '' end
local fields, is_other = {}, false
for i = 1, #letter[2], 2 do
  if letter[2][i]:sub(1, 5) ~= 'dead_' then
    fields[#fields + 1] = letter[2][i]
    fields[#fields + 1] = letter[2][i + 1]
  elseif letter[2][i] == 'dead_reason' then
    is_other = letter[2][i + 1]:sub(1, 9) == 'ID_REUSED'
  end
end
if is_other and known[1] then return '' end
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
local entry = redis.call('XADD', KEYS[2], '*', unpack(fields))
local sid = ARGV[2] .. '/' .. entry
-- The attempts continue to count: the number is the fence against earlier workers.
redis.call('HSET', KEYS[3], 'state', 'waiting', 'sid', sid, 'attempt', known[2] or 0,
  'digest', known[3] or '')
local size = queued_tokens_of(fields)
queue_tokens(KEYS[6], KEYS[2], size)
if tenant_of(KEYS[2]) then enter_intake(KEYS[2], 1, size) end
return sid
