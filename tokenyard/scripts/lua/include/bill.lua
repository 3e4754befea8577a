-- Add to the service of a tenant, also where it stands in line.
local function bill(prefix, tenant, amount)
  local sum = redis.pcall('ZINCRBY', prefix .. 'service', amount, tenant)
  if type(sum) == 'table' then redis.call('ZADD', prefix .. 'service', 0, tenant) end
  sum = redis.pcall('ZADD', prefix .. 'line', 'XX', 'INCR', amount, tenant)
  if type(sum) == 'table' then redis.call('ZADD', prefix .. 'line', 'XX', 0, tenant) end
end
