#!lua flags=allow-oom
-- A client that wants its requests cancelled when it disappears says that it is there, or that
-- it leaves.
--
-- KEYS[1] clients (zset): lease expiry in ms by client
-- KEYS[2] attached:<client> (set): ids to cancel when its lease ends
-- ARGV[1] the client
-- ARGV[2] length of its lease in ms from now; 0: it leaves
-- ARGV[3...] ids that have ended, to be cancelled no more
-- Returns the number of ids that are attached still; at 0 the client is watched no more
-- Atomic, because a client must be watched as long as a request of its is attached.

-- @include server_ms

for i = 3, #ARGV do redis.call('SREM', KEYS[2], ARGV[i]) end
local attached = redis.call('SCARD', KEYS[2])
if attached > 0 then
  redis.call('ZADD', KEYS[1], server_ms() + tonumber(ARGV[2]), ARGV[1])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return attached
