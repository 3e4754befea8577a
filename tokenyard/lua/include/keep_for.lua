-- Let a reply stream live at least so many seconds from now. Never fewer than before: other
-- requests' results may stand in it, too.
local function keep_for(stream, seconds)
  if redis.call('TTL', stream) < tonumber(seconds) then
    redis.call('EXPIRE', stream, seconds)
  end
end
