-- The next number of a counter, never given out twice. An invalid counter continues from the time in
-- ms, beyond any earlier number.
local function next_in(counters, name)
  local number = redis.pcall('HINCRBY', counters, name, 1)
  if type(number) == 'table' then
    local now = redis.call('TIME')
    number = now[1] * 1000 + math.floor(now[2] / 1000)
    redis.call('HSET', counters, name, string.format('%.0f', number))
  end
  return string.format('%.0f', number)
end
