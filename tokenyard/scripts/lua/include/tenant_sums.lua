-- What a script adds to the counts of tenants, collected: each is written once, however many of a tenant's
-- requests there are. `charge` adds to the service, `run` to what runs, `use` to what was used today of a
-- model, by name of the count; `usual` is the usual length of an answer. No tenant, '', has only a service.
-- @include count_in
-- @include keep_count
-- @include today
local function tenant_sums(prefix)
  local sums, all = {}, {}

  -- Add to the service of a tenant, also where it stands in line.
  local function bill(tenant, amount)
    local sum = redis.pcall('ZINCRBY', prefix .. 'service', amount, tenant)
    if type(sum) == 'table' then redis.call('ZADD', prefix .. 'service', 0, tenant) end
    sum = redis.pcall('ZADD', prefix .. 'line', 'XX', 'INCR', amount, tenant)
    if type(sum) == 'table' then redis.call('ZADD', prefix .. 'line', 'XX', 0, tenant) end
  end

  local function of(tenant)
    sums[tenant] = sums[tenant] or {running = 0, usage = {}}
    return sums[tenant]
  end

  -- Nothing in a ledger moves a service by more than a bound, or makes it other than a number.
  function all.charge(tenant, amount)
    local MOST, sum = 1e12, of(tenant)
    sum.service = (sum.service or 0) + math.max(-MOST, math.min(MOST, amount))
  end

  function all.run(tenant, number) of(tenant).running = of(tenant).running + number end

  function all.running(tenant) return of(tenant).running end

  function all.use(tenant, model, counts)
    local usage, day = of(tenant).usage, today() .. ' ' .. model:sub(1, 200) .. ' '
    for name, number in pairs(counts) do
      if number > 0 then usage[day .. name] = (usage[day .. name] or 0) + number end
    end
  end

  function all.usual(tenant, default, most)
    local sum = of(tenant)
    local usual = sum.usual or tonumber(redis.call('HGET', prefix .. 'tenant:' .. tenant, 'usual') or default)
    return usual and usual >= 0 and usual <= most and usual or default
  end

  function all.set_usual(tenant, usual) of(tenant).usual = usual end

  function all.write()
    for tenant, sum in pairs(sums) do
      local counts = prefix .. 'tenant:' .. tenant
      if sum.service then bill(tenant, sum.service) end
      if tenant ~= '' then
        if sum.running ~= 0 then keep_count(counts, 'running', sum.running) end
        if sum.usual then redis.call('HSET', counts, 'usual', string.format('%.1f', sum.usual)) end
        for field, number in pairs(sum.usage) do
          count_in(prefix .. 'usage:' .. tenant, field, number)
        end
      end
    end
    sums = {}
  end

  return all
end
