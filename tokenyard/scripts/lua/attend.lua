#!lua flags=allow-oom
-- Renew or end the lease of a client whose requests are cancelled when it disappears.
--
-- KEYS[1] clients (zset): lease expiry in ms by client
-- KEYS[2] attached:<client> (set): ids to cancel when its lease ends
-- ARGV[1] the client
-- ARGV[2] length of its lease in ms from now; 0: it leaves
-- ARGV[3...] ids that have ended, and are detached
-- Returns the number of ids that are still attached; at 0 the client has no lease any more
-- Atomic, because a client must have a lease as long as one of its requests is attached.

-- @include server_ms

for i = 3, #ARGV do redis.call('SREM', KEYS[2], ARGV[i]) end
local attached = redis.call('SCARD', KEYS[2])
if attached > 0 then
  redis.call('ZADD', KEYS[1], server_ms() + tonumber(ARGV[2]), ARGV[1])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return attached
