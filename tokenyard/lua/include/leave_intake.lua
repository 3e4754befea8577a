-- Delete entries of an intake. Clients may choose entry ids, and after the highest possible one no
-- other entry can follow: an empty intake whose last id is in the far future (after the year 2286)
-- is created again.
local function leave_intake(intake, group, entries)
  local MOST_UNPACKED = 1000
  for first = 1, #entries, MOST_UNPACKED do
    local last = math.min(first + MOST_UNPACKED - 1, #entries)
    redis.call('XACK', intake, group, unpack(entries, first, last))
    redis.call('XDEL', intake, unpack(entries, first, last))
  end
  if redis.call('XLEN', intake) > 0 or redis.call('EXISTS', intake) == 0 then return end
  local info = redis.call('XINFO', 'STREAM', intake)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' and info[i + 1]:find('-') > 14 then
      redis.call('DEL', intake)
      redis.call('XGROUP', 'CREATE', intake, group, '0', 'MKSTREAM')
    end
  end
end
