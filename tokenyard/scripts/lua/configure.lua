#!lua flags=allow-oom
-- Change the settings of tenants, all of them or none, and announce it.
--
-- KEYS[1] tenants (hash): JSON by tenant
-- KEYS[2] events (stream)
-- ARGV[1...] three for each tenant: its name, its settings as the caller has read them (JSON), and
-- the new ones (JSON); '' for none
-- Returns 1, or 0 where a tenant has other settings than the caller has read
-- Atomic, because of two simultaneous operators one must see the other's change, and because a file
-- of tenants is applied as a whole.

for i = 1, #ARGV, 3 do
  local seen = redis.call('HGET', KEYS[1], ARGV[i]) or ''
  if seen ~= ARGV[i + 1] then return 0 end
end
for i = 1, #ARGV, 3 do
  if ARGV[i + 2] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
  end
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'event', 'tenants')
return 1
