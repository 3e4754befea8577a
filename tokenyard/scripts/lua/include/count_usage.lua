-- Add to what a tenant has used today of a model, by name of the count. No tenant is not counted.
-- @include count_in
-- @include today
local function count_usage(prefix, tenant, model, counts)
  if tenant == '' then return end
  local usage, field = prefix .. 'usage:' .. tenant, today() .. ' ' .. model:sub(1, 200) .. ' '
  for name, number in pairs(counts) do
    if number > 0 then count_in(usage, field .. name, number) end
  end
end
