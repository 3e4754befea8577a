-- Count a request of a tenant that is over: its status, and the tokens that it has used (`input`, those
-- of them that were `cached`, and `output`).
-- @include count_usage
local function count_end(prefix, tenant, model, status, used)
  local counts = {requests = 1, ['in'] = used.input, cached = used.cached or 0, out = used.output}
  if status == 'cancelled' then
    counts.cancelled = 1
  elseif status ~= 'completed' then
    counts.failed = 1
  end
  count_usage(prefix, tenant, model, counts)
end
