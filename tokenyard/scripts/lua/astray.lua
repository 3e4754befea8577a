#!lua flags=no-writes
-- Scan some ledgers for requests that wait or run by their ledger, but whose entry was deleted from
-- its stream by hand; and for tenants who have something waiting and do not stand in line.
--
-- KEYS[1] leases (zset): lease expiry in ms by worker; its name says how the yard's keys begin
-- KEYS[2] tally (hash): counters
-- ARGV[1] the cursor of SCAN: 0 to begin
-- ARGV[2] most keys of the server to visit, about; a request that waits or runs counts as five
-- Returns where to continue (0 at the end), the number of ledgers read, the tokens of those among
--   them that wait in their places, the yard's count of waiting tokens, and the requests found,
--   each as <client>/<id>, state, intake or worker where it should be, entry there, 1 if that
--   worker may still run it (else 0); and those tenants
-- Atomic by itself: nothing is changed. So `reconcile` has to check its findings again.

-- @include counted
-- @include entry_at
-- @include has_lease
-- @include place_of
-- @include queued_tokens_of
-- @include tenant_of

-- To look for an entry takes as long as a few ledgers of what is over. It comes with what is in it, so
-- a look also ends after very many bytes.
local PAGE, ENTRY, MOST_BYTES = 16, 4, 4 * 1024 * 1024
local prefix = KEYS[1]:sub(1, -1 - #'leases')
local ledgers = prefix .. 'request:'

local found, looked, tokens, size, seen = {}, 0, 0, 0, 0
-- Tenants with something waiting, each looked up once.
local tenants, out_of_line = {}, {}
local function check_line(intake)
  local _, _, tenant = tenant_of(intake)
  if not tenant or tenants[tenant] then return end
  tenants[tenant] = true
  if not redis.call('ZSCORE', prefix .. 'line', tenant) then
    out_of_line[#out_of_line + 1] = tenant
  end
end

local function look(ledger)
  looked = looked + 1
  local known = redis.call('HMGET', ledger, 'state', 'sid', 'intake', 'entry', 'worker')
  local where, entry = place_of(known)
  if not where then return end
  seen = seen + ENTRY
  local state = known[1]
  local waits = state == 'waiting'
  local stream = prefix .. (waits and 'intake:' or 'lane:') .. where
  local fields = where ~= '' and entry_at(stream, entry)
  if not fields then
    local may_run = not waits and has_lease(KEYS[1], where)
    found[#found + 1] = {ledger:sub(#ledgers + 1), state, where, entry, may_run and 1 or 0}
    return
  end
  for i = 2, #fields, 2 do size = size + #fields[i] end
  if waits and where ~= 'retry' then
    tokens = tokens + queued_tokens_of(fields)
    check_line(stream)
  end
end

local cursor = ARGV[1]
repeat
  local page = redis.call('SCAN', cursor, 'MATCH', ledgers .. '*', 'COUNT', PAGE, 'TYPE', 'hash')
  cursor, seen = page[1], seen + PAGE
  for _, ledger in ipairs(page[2]) do look(ledger) end
until cursor == '0' or seen >= tonumber(ARGV[2]) or size >= MOST_BYTES
return {cursor, looked, tokens, counted(KEYS[2], 'queued_tokens'), found,
  out_of_line}
