#!lua flags=allow-oom
-- Take the lead of the yard, or keep it.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>", expires with the lease
-- KEYS[2] info (hash): holds the counter of epochs
-- ARGV[1] the coordinator's name
-- ARGV[2] length of the lease in ms
-- ARGV[3] the caller's leader token, or '' if it has none
-- ARGV[4] when another's lease ends, if the caller has seen that not to move for the length of the
--   lease, else 0: the server's clock may have been set back, and the lease would last too long
-- Returns the caller's leader token while it leads, or '' if another does
-- Atomic, because two coordinators must never hold the lead at once.

-- @include next_in

local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[3] then
  if redis.call('PEXPIRETIME', KEYS[1]) ~= tonumber(ARGV[4]) then return '' end
  holder = false
end
if not holder then
  holder = next_in(KEYS[2], 'epoch') .. ':' .. ARGV[1]
end
redis.call('SET', KEYS[1], holder, 'PX', ARGV[2])
return holder
