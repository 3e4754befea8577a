#!lua flags=allow-oom
-- Cancel a request, wherever it is: it gets its result immediately, and its worker is told.
--
-- KEYS[1] request:<client>/<id> (hash)
-- KEYS[2] tokens:<client>/<id> (string)
-- KEYS[3] intake:<intake> or lane:<worker> (stream): where the caller saw it; any, if
--   nowhere
-- KEYS[4] reply:<client>/<id> (stream)
-- KEYS[5] replies:<client> (stream); the entry may name another one
-- KEYS[6] tally (hash)
-- KEYS[7] quarantine (hash): the entry that runs alone, by worker
-- ARGV[1] state in which the caller saw it: waiting, assigned, or '' for not at all
-- ARGV[2] intake or worker where the caller saw it
-- ARGV[3] request id
-- ARGV[4] time to live in s of a result for an id that is not known
-- ARGV[5] most entries a reply stream keeps, about
-- ARGV[6] the error (JSON)
-- ARGV[7] the entry in the intake where the caller saw a request that has no ledger yet, else ''
-- Returns 1 CANCELLED, 2 OVER (it has its result already), 3 MOVED (it is elsewhere now: look
--   again), 4 CANCELLED_BEFORE_ARRIVAL (the id is unknown: its result is stored, and a request that
--   comes later is dropped)
-- Atomic, because a request must not be taken from a place that it has left.

-- @include add_replies
-- @include count_end
-- @include count_in
-- @include end_charge
-- @include end_quarantine
-- @include entry_at
-- @include entry_fields
-- @include keep_for
-- @include leave_intake
-- @include media_of
-- @include pack_result
-- @include place_of
-- @include prefix_of
-- @include queue_tokens
-- @include queued_tokens_of
-- @include read_charge
-- @include server_ms
-- @include tenant_sums

local CANCELLED, OVER, MOVED, CANCELLED_BEFORE_ARRIVAL = 1, 2, 3, 4
local MOST_TTL_S = 30 * 24 * 3600
local ledger, place = KEYS[1], KEYS[3]
local known = redis.call('HMGET', ledger, 'state', 'sid', 'intake', 'entry', 'worker', 'charge')
local state, entry = known[1], known[4]

-- Whether the fields of an entry (see `entry_fields`) are those of the request of this ledger.
local function is_of(fields, ledger)
  local client = fields['client'] or ''
  local name = (client ~= '' and client or 'anon') .. '/' .. (fields['id'] or '')
  return ledger:match('^tokenyard:{[^}]*}:request:(.*)$') == name
end

-- Leave an estimate charged: how much the engine has generated, its worker will say, see `end_cancelled`.
local function postpone(charge, input, output)
  local sums = tenant_sums(prefix_of(ledger))
  if charge.tenant ~= '' then sums.run(charge.tenant, -1) end
  count_end(sums, charge.tenant, charge.model, 'cancelled', {input = 0, output = output})
  sums.write()
  redis.call('HSET', ledger, 'used', string.format('%.0f %.0f', input, output))
end

local function conclude(ttl, is_flat, framed)
  local result = pack_result(ARGV[3], 'cancelled', redis.call('GET', KEYS[2]) or '', ARGV[6])
  redis.call('HSET', ledger, 'state', 'cancelled', 'result', result, 'ended', server_ms())
  redis.call('EXPIRE', ledger, ttl)
  redis.call('DEL', KEYS[2])
  redis.call('DEL', media_of(ledger)) -- a user may have another right for it
  local places = {flat = is_flat and KEYS[4], frame = framed}
  for kind, destination in pairs(places) do
    if destination then
      add_replies(destination, kind, {result}, ARGV[5])
      keep_for(destination, ttl)
    end
  end
end

if not state and ARGV[7] == '' then
  conclude(ARGV[4], true, false)
  return CANCELLED_BEFORE_ARRIVAL
end
if state then
  if state ~= 'waiting' and state ~= 'assigned' then return OVER end
  local where
  where, entry = place_of(known)
  if state ~= ARGV[1] or where ~= ARGV[2] then return MOVED end
else
  -- A plain XADD that was not dispatched yet: it has only its entry.
  entry = ARGV[7]
end

-- A ledger that a client has written may name the entry of another request, or none.
local found = entry ~= '' and entry_at(place, entry)
local fields = entry_fields(found or {})
local is_own = found and is_of(fields, ledger)
local charge = state == 'assigned' and is_own and read_charge(known[6])
if not found then
  if not state then return MOVED end
  -- It was deleted by hand; the worker and its lane may be gone, too.
  if state == 'assigned' then end_quarantine(KEYS[7], ARGV[2], entry) end
elseif not is_own then
  if not state then return MOVED end
  fields = {}
elseif state == 'assigned' then
  redis.call('XDEL', place, entry)
  redis.call('XADD', place, '*', 'cancel', entry,
    unpack(charge and {'request', ledger:match(':request:(.*)$')} or {}))
  end_quarantine(KEYS[7], ARGV[2], entry)
else
  leave_intake(place, {entry}, queued_tokens_of(found))
  if not state then
    redis.call('HSET', ledger, 'sid', ARGV[2] .. '/' .. entry)
  elseif ARGV[2] ~= 'retry' then
    queue_tokens(KEYS[6], place, -queued_tokens_of(found))
  end
end
-- What an engine has read and written for it is its tenant's to pay.
local output = math.floor(#(redis.call('GET', KEYS[2]) or '') / 4)
local has_run = state == 'assigned' or output > 0
local input = has_run and is_own and queued_tokens_of(found) or 0
if charge then
  postpone(charge, input, output)
else
  end_charge(ledger, 'cancelled', {input = input, output = output}, state ~= 'assigned' and place)
end
-- For the leader's metrics: no other process sees all cancels.
local class = string.match(known[2] or ARGV[2], '^%l+')
count_in(KEYS[6], 'count:cancelled:' .. (class or ''), 1)
-- The entry may not be validated yet.
local ttl = tonumber((fields['result_ttl'] or ''):match('^%d+$') or '0')
if ttl < 1 or ttl > MOST_TTL_S then ttl = ARGV[4] end
-- Only the entry has the reply stream, so the result goes to both.
local framed = not found and KEYS[5]
if (fields['reply_to'] or '') ~= '' then
  local name = fields['reply_to']:match('^replies:[%w_.:@-]+$')
  framed = name and prefix_of(ledger) .. name or KEYS[5]
end
conclude(ttl, not found or not framed, framed)
return CANCELLED
