-- A counter that clients may write; 0 where it was spoilt: none has 16 digits by itself.
local function counted(counters, name)
  local count = redis.call('HGET', counters, name) or ''
  return #count < 16 and tonumber(count:match('^%d+$')) or 0
end
