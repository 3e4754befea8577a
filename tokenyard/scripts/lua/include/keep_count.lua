-- Add to a count that is never below 0; returns the sum. An invalid one restarts.
local function keep_count(counters, name, number)
  local sum = redis.pcall('HINCRBY', counters, name, number)
  if type(sum) == 'table' or sum < 0 then
    sum = type(sum) == 'table' and math.max(0, number) or 0
    redis.call('HSET', counters, name, sum)
  end
  return sum
end
