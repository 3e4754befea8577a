-- The limits that an operator has set for the tenant of an intake, and what is left of them; nil where
-- there are none. `over` names the limit that refuses a request, and when it would be admitted: a time in ms,
-- false as soon as others leave, -1 never. `take` counts an admitted one and returns what its ledger keeps
-- as `reserved` (see `settle_tokens`), if anything; `keep` writes the counts. `refuse` counts refusals for
-- operators.
-- @include count_in
-- @include counted
-- @include server_ms
-- @include tenant_of
-- @include tenant_settings
-- @include token_windows
local function quota_of(intake)
  local UNBOUNDED = 512 -- reserved for an answer without a bound
  local prefix, class, tenant = tenant_of(intake)
  local settings = tenant_settings(prefix, tenant)
  if not settings then return nil end
  local counts, now = prefix .. 'tenant:' .. tenant, server_ms()
  local function limit(name)
    local most = settings[name]
    return type(most) == 'number' and most > 0 and most or nil
  end

  local function allows(name, wanted)
    local list = settings[name]
    if type(list) ~= 'table' then return true end
    for _, one in ipairs(list) do
      if one == wanted then return true end
    end
    return false
  end

  local windows = {}
  for _, window in ipairs(token_windows()) do
    window.most = limit(window.limit)
    if window.most then windows[#windows + 1] = window end
  end
  for _, window in ipairs(windows) do
    local fields = {}
    for i = 1, window.count do fields[i] = window.mark .. i - 1 end
    window.now = math.floor(now / window.width)
    window.sum, window.buckets, window.taken = 0, {}, 0
    for i, text in ipairs(redis.call('HMGET', counts, unpack(fields))) do
      local number, sum = (text or ''):match('^(%d+) (%d+)$')
      number = tonumber(number)
      if number and math.abs(window.now - number) < window.count then
        window.buckets[#window.buckets + 1] = {number = number, sum = tonumber(sum)}
        window.sum = window.sum + tonumber(sum)
      end
    end
    table.sort(window.buckets, function(a, b) return a.number < b.number end)
  end

  -- The time until so many more tokens fit: until enough of the oldest buckets have left.
  local function time_until(window, tokens)
    local over = window.sum + tokens - window.most
    for _, bucket in ipairs(window.buckets) do
      over = over - bucket.sum
      if over <= 0 then return (bucket.number + window.count) * window.width - now end
    end
    return window.width
  end

  local quota = {waiting = counted(counts, 'waiting'),
    waiting_tokens = counted(counts, 'waiting_tokens')}

  function quota.over(asked, tokens)
    local most = limit('max_tokens')
    if not allows('models', asked.model) then return 'models', -1 end
    if not allows('classes', class) then return 'classes', -1 end
    if most and (not asked.most or asked.most > most) then return 'max_tokens', -1 end
    most = limit('max_waiting_requests')
    if most and quota.waiting >= most then return 'max_waiting_requests', false end
    most = limit('max_waiting_tokens')
    if most and tokens > most then return 'max_waiting_tokens', -1 end
    if most and quota.waiting_tokens + tokens > most then return 'max_waiting_tokens', false end
    local whole_of_it = tokens + (asked.most or UNBOUNDED) * asked.choices
    for _, window in ipairs(windows) do
      if whole_of_it > window.most then return window.limit, -1 end
      if window.sum + whole_of_it > window.most then
        return window.limit, time_until(window, whole_of_it)
      end
    end
  end

  function quota.take(asked, tokens)
    quota.waiting, quota.waiting_tokens = quota.waiting + 1, quota.waiting_tokens + tokens
    if #windows == 0 then return nil end
    local whole_of_it = tokens + (asked.most or UNBOUNDED) * asked.choices
    for _, window in ipairs(windows) do
      window.sum, window.taken = window.sum + whole_of_it, window.taken + whole_of_it
    end
    return string.format('%.0f %.0f ', whole_of_it, now) .. tenant
  end

  function quota.keep()
    for _, window in ipairs(windows) do
      local sum = window.taken
      for _, bucket in ipairs(window.buckets) do
        if bucket.number == window.now then sum = sum + bucket.sum end
      end
      if window.taken > 0 then
        redis.call('HSET', counts, window.mark .. window.now % window.count,
          string.format('%.0f %.0f', window.now, sum))
      end
    end
  end

  function quota.refuse(name)
    count_in(counts, 'refused:' .. name, 1)
    -- By the hour too, of which two are kept, as the buckets of a token window are.
    local hour = math.floor(now / 3600000)
    local field = 'refused:' .. name .. ':' .. hour % 2
    local number, sum = (redis.call('HGET', counts, field) or ''):match('^(%d+) (%d+)$')
    sum = tonumber(number) == hour and #sum < 16 and tonumber(sum) or 0
    redis.call('HSET', counts, field, string.format('%.0f %.0f', hour, sum + 1))
    redis.call('HSET', counts, 'refused_at:' .. name, string.format('%.0f', now))
  end

  return quota
end
