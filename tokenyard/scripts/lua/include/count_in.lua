-- Add to a counter that clients may write; an invalid one restarts.
local function count_in(counters, name, number)
  local sum = redis.pcall('HINCRBY', counters, name, number)
  if type(sum) == 'table' and sum.err then
    redis.call('HSET', counters, name, math.max(0, number))
  end
end
