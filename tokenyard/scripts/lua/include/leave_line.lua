-- Take a tenant that has nothing waiting out of the line, and note where it was.
local function leave_line(prefix, tenant)
  local at = redis.call('ZSCORE', prefix .. 'line', tenant)
  if not at then return end
  redis.call('ZREM', prefix .. 'line', tenant)
  redis.call('HSET', prefix .. 'tally', 'service_level', at)
end
