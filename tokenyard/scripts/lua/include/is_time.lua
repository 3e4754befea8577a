-- Whether a time in ms is that of the server. If not, its clock was set and the caller will notice
-- soon: until then nothing may end by the clock.
local function is_time(ms)
  local now = redis.call('TIME')
  return math.abs(now[1] * 1000 + now[2] / 1000 - ms) <= 2000
end
