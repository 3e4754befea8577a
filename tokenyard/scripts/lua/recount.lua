#!lua flags=allow-oom
-- Count what waits in a tenant's intakes, and put the tenant in line or take it out.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] line (zset): service by tenant, of those with requests waiting. The names of the tenant's
--   other keys follow from it
-- ARGV[1] the caller's leader token
-- ARGV[2] the tenant; '' for the common intakes, which are in line only while others are
-- Returns -1 NOT_LEADER, or how many wait
-- Atomic, because requests come and go.

-- @include recount_intakes

local NOT_LEADER = -1
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
return recount_intakes(KEYS[2]:sub(1, -1 - #'line'), ARGV[2])
