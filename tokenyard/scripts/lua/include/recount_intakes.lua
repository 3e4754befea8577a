-- Count what waits for a tenant, whose entries somebody may have deleted by hand, and correct its counts
-- and its place in line. No tenant, '', is in line while others are, too. Returns how many wait.
-- @include count_of_tenants
-- @include join_line
-- @include keep_count
-- @include leave_line
local function recount_intakes(prefix, tenant)
  local counts, waiting, others = prefix .. 'tenant:' .. tenant, 0, 1
  for _, class in ipairs({'high', 'normal', 'low'}) do
    local name = tenant == '' and class or class .. ':' .. tenant
    local length = redis.call('XLEN', prefix .. 'intake:' .. name)
    waiting = waiting + length
    if tenant ~= '' then
      local off = length - keep_count(counts, 'waiting:' .. class, 0)
      keep_count(counts, 'waiting:' .. class, off)
      count_of_tenants(prefix .. 'tally', class, off)
    end
  end
  if tenant ~= '' then
    redis.call('HSET', counts, 'waiting', waiting)
    if waiting == 0 then redis.call('HSET', counts, 'waiting_tokens', 0) end
  else
    local is_in = redis.call('ZSCORE', prefix .. 'line', tenant)
    others = redis.call('ZCARD', prefix .. 'line') - (is_in and 1 or 0)
  end
  if waiting > 0 and others > 0 then
    join_line(prefix, tenant)
  else
    leave_line(prefix, tenant)
  end
  return waiting
end
