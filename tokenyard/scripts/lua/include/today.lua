-- The server's day in UTC, as yyyymmdd, which is the same as long as a script runs. Scripts have no
-- calendar.
local today
do
  local known

  local function read()
    local floor = math.floor
    local days = floor(redis.call('TIME')[1] / 86400) + 719468 -- since 1 March of the year 0
    local era = floor(days / 146097)
    local day = days - era * 146097
    local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
    day = day - (365 * year + floor(year / 4) - floor(year / 100))
    local month = floor((5 * day + 2) / 153)
    day = day - floor((153 * month + 2) / 5) + 1
    year = year + era * 400 + (month > 9 and 1 or 0)
    return string.format('%04d%02d%02d', year, month > 9 and month - 9 or month + 3, day)
  end

  today = function()
    known = known or read()
    return known
  end
end
