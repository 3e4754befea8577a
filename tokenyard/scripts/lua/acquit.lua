#!lua flags=allow-oom
-- Acquit a group on trial: its members are no suspects any more, and the lane is open again.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] quarantine (hash): what is on trial on a lane, by worker
-- KEYS[3...] request:<client>/<id> (hash) of each member
-- ARGV[1] the caller's leader token
-- ARGV[2] the worker
-- ARGV[3] its field of `quarantine` as the caller saw it
-- ARGV[4] '-' to keep the lane for further suspects, '' to keep it no more
-- Returns -1 NOT_LEADER, 1 ACQUITTED, 0 CHANGED (something else is on trial there by now)
-- Atomic, because a crash must find either a group on trial or a lane that is as any other.

local NOT_LEADER, ACQUITTED, CHANGED = -1, 1, 0
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return NOT_LEADER end
local worker = ARGV[2]
if redis.call('HGET', KEYS[2], worker) ~= ARGV[3] then return CHANGED end
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[2], worker)
else
  redis.call('HSET', KEYS[2], worker, ARGV[4])
end
for i = 3, #KEYS do
  local owner = redis.call('HGET', KEYS[i], 'worker')
  if owner == worker then redis.call('HDEL', KEYS[i], 'trial') end
end
return ACQUITTED
