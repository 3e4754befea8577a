-- Count a request of a tenant that is over, in `tenant_sums`: its status, the tokens that it has used
-- (`input`, those of them that were `cached`, and `output`), and the `code` of its error where it failed.
-- The length of its last completed answers, each an eighth, is what the leader charges the next ones by;
-- see `USUAL_AT_FIRST` there.
local function count_end(sums, tenant, model, status, used)
  local FIRST, MOST = 32, 1e9
  local counts = {requests = 1, ['in'] = used.input, cached = used.cached or 0, out = used.output}
  if tenant == '' then return end
  if status == 'cancelled' then
    counts.cancelled = 1
  elseif status ~= 'completed' then
    counts.failed = 1
    counts['failed:' .. ((used.code or ''):match('^[%u_]+$') or 'UNKNOWN')] = 1
  else
    local usual = sums.usual(tenant, FIRST, MOST)
    sums.set_usual(tenant, usual + (used.output - usual) / 8)
  end
  sums.use(tenant, model, counts)
end
