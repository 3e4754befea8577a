-- Keep a reply stream for at least this many seconds. Never shortens its time to live, since it may
-- have results of other requests.
local function keep_for(stream, seconds)
  if redis.call('TTL', stream) < tonumber(seconds) then
    redis.call('EXPIRE', stream, seconds)
  end
end
