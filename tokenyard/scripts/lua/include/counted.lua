-- A counter that clients may write; 0 where it is invalid, as one of 16 digits is.
local function counted(counters, name)
  local count = redis.call('HGET', counters, name) or ''
  return #count < 16 and tonumber(count:match('^%d+$')) or 0
end
