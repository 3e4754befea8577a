-- Add to the service of a tenant, also where it stands in line. Nothing in a ledger moves it by more
-- than a bound, or makes it other than a number.
local function bill(prefix, tenant, amount)
  local MOST = 1e12
  if amount ~= amount then return end
  amount = math.max(-MOST, math.min(MOST, amount))
  local sum = redis.pcall('ZINCRBY', prefix .. 'service', amount, tenant)
  if type(sum) == 'table' then redis.call('ZADD', prefix .. 'service', 0, tenant) end
  sum = redis.pcall('ZADD', prefix .. 'line', 'XX', 'INCR', amount, tenant)
  if type(sum) == 'table' then redis.call('ZADD', prefix .. 'line', 'XX', 0, tenant) end
end
