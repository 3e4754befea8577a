-- End the quarantine of a lane whose only request has left it.
local function end_quarantine(quarantine, worker, entry)
  if redis.call('HGET', quarantine, worker) == entry then
    redis.call('HDEL', quarantine, worker)
  end
end
