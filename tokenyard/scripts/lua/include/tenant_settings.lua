-- The settings that an operator has written for a tenant; nil where there are none, or none that can be
-- read. Their values may be anything.
local function tenant_settings(prefix, tenant)
  local packed = redis.call('HGET', prefix .. 'tenants', tenant)
  if not packed then return nil end
  local is_read, settings = pcall(cjson.decode, packed)
  return is_read and type(settings) == 'table' and settings or nil
end
