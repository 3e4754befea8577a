-- Count requests that were added to a tenant's intake, and put the tenant in line. `size` is their
-- tokens, by `queued_tokens_of`.
-- @include count_of_tenants
-- @include join_line
-- @include keep_count
-- @include tenant_of
local function enter_intake(intake, count, size)
  local prefix, class, tenant = tenant_of(intake)
  redis.call('PERSIST', intake) -- see `leave_intake`
  local counts = prefix .. 'tenant:' .. tenant
  keep_count(counts, 'waiting', count)
  keep_count(counts, 'waiting:' .. class, count)
  keep_count(counts, 'waiting_tokens', size)
  count_of_tenants(prefix .. 'tally', class, count)
  join_line(prefix, tenant)
  -- It only wakes; a client may have given this stream its highest id, after which no other can follow.
  redis.pcall('XADD', prefix .. 'arrivals', 'MAXLEN', '~', 1000, '*', 'event', 'tenants',
    'intake', class .. ':' .. tenant)
end
