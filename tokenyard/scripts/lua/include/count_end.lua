-- Count a request of a tenant that is over: its status, and the tokens that it has used (`input`, those
-- of them that were `cached`, and `output`), and the code of its error where it failed. The length of its last completed answers, each an eighth, is
-- what the leader charges the next ones by; see `USUAL_AT_FIRST` there.
-- @include count_usage
local function count_end(prefix, tenant, model, status, used, code)
  local counts = {requests = 1, ['in'] = used.input, cached = used.cached or 0, out = used.output}
  if status == 'cancelled' then
    counts.cancelled = 1
  elseif status ~= 'completed' then
    counts.failed = 1
    counts['failed:' .. ((code or ''):match('^[%u_]+$') or 'UNKNOWN')] = 1
  else
    local FIRST, MOST, key = 32, 1e9, prefix .. 'tenant:' .. tenant
    local usual = tonumber(redis.call('HGET', key, 'usual') or FIRST)
    if not usual or not (usual >= 0 and usual <= MOST) then usual = FIRST end
    redis.call('HSET', key, 'usual', string.format('%.1f', usual + (used.output - usual) / 8))
  end
  count_usage(prefix, tenant, model, counts)
end
