-- Delete entries of an intake. Clients may choose entry ids, and after the highest possible one no
-- other entry can follow: an empty intake whose last id is in the far future (after the year 2286)
-- is deleted, so that the next entry creates it again. From a tenant's intake, `size` is their tokens;
-- an empty one is forgotten after a while, in which no entry id can repeat. Whoever calls it for many
-- intakes counts what has left all tenants once: `gone_of` adds it up by class.
-- @include count_of_tenants
-- @include keep_count
-- @include leave_line
-- @include tenant_of
local function leave_intake(intake, entries, size, gone_of)
  local MOST_UNPACKED, FORGET_S = 1000, 60
  local prefix, class, tenant = tenant_of(intake)
  local gone = 0
  for first = 1, #entries, MOST_UNPACKED do
    local last = math.min(first + MOST_UNPACKED - 1, #entries)
    gone = gone + redis.call('XDEL', intake, unpack(entries, first, last))
  end
  if tenant and gone > 0 then
    local counts = prefix .. 'tenant:' .. tenant
    if gone_of then
      gone_of[class] = (gone_of[class] or 0) + gone
    else
      count_of_tenants(prefix .. 'tally', class, -gone)
    end
    keep_count(counts, 'waiting:' .. class, -gone)
    keep_count(counts, 'waiting_tokens', -(size or 0))
    if keep_count(counts, 'waiting', -gone) == 0 then
      redis.call('HSET', counts, 'waiting_tokens', 0)
      leave_line(prefix, tenant)
    end
  end
  if redis.call('XLEN', intake) > 0 or redis.call('EXISTS', intake) == 0 then return end
  local info = redis.call('XINFO', 'STREAM', intake)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' and info[i + 1]:find('-') > 14 then
      redis.call('DEL', intake)
    end
  end
  if tenant then redis.call('EXPIRE', intake, FORGET_S) end
end
