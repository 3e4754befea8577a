-- Whether a worker holds its lease: its score is the expiry in ms; 0 is lost, -1 is left. An
-- expired lease still counts until the rescuer takes it, so that one moment decides for all.
local function has_lease(leases, worker)
  local lease = redis.call('ZSCORE', leases, worker)
  return lease and tonumber(lease) > 0
end
