#!lua flags=allow-oom
-- A worker reports what its engine had used for cancelled requests, and their tenants have paid that.
--
-- KEYS[1...] for each request: request:<client>/<id> (hash)
-- ARGV[1] the worker
-- ARGV[2...] for each request: lane entry, tokens in ('': the engine had not begun with it), those of
--   them that were cached, tokens out. The names of the tenant's keys follow from that of the ledger
-- Returns one code for each request: 1 SETTLED, 0 STALE (it is settled, or was not cancelled on this
--   lane)
-- Atomic, because a charge must be settled only once.

-- @include end_cancelled
-- @include prefix_of
-- @include tenant_sums

local SETTLED, STALE = 1, 0
local sums, replies = tenant_sums(prefix_of(KEYS[1])), {}
for i = 1, #KEYS do
  local a = 4 * i - 2
  local used = {input = tonumber(ARGV[a + 1]), cached = tonumber(ARGV[a + 2]),
    output = tonumber(ARGV[a + 3])}
  replies[i] = end_cancelled(sums, KEYS[i], ARGV[1], ARGV[a], used) and SETTLED or STALE
end
sums.write()
return replies
