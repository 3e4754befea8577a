-- Put a tenant in line, unless it is there: at what it has had, but not before those in line, or, where
-- nobody is, before where the last one left. So rest is not saved up. What it is moved by is noted:
-- its service without that is what it has really had.
local function join_line(prefix, tenant)
  local line, service = prefix .. 'line', prefix .. 'service'
  if redis.call('ZSCORE', line, tenant) then return end
  local least = redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2]
    or redis.call('HGET', prefix .. 'tally', 'service_level')
  local had = tonumber(redis.call('ZSCORE', service, tenant) or '0')
  local at = math.max(had, tonumber(least or '0') or 0)
  if at ~= at or at == math.huge then at = had end -- a client may write the tally
  if at > had then
    local counters = prefix .. 'tenant:' .. tenant
    local sum = redis.pcall('HINCRBY', counters, 'lifted', string.format('%.0f', at - had))
    if type(sum) == 'table' then redis.call('HSET', counters, 'lifted', 0) end
  end
  redis.call('ZADD', line, at, tenant)
  redis.call('ZADD', service, at, tenant)
end
