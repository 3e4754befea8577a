-- A request that ran alone on its lane is gone from there: others may come again.
local function end_quarantine(quarantine, worker, entry)
  if redis.call('HGET', quarantine, worker) == entry then
    redis.call('HDEL', quarantine, worker)
  end
end
