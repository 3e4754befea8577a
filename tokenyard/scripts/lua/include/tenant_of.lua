-- What the key of a tenant's intake says: how the yard's keys begin, the class and the tenant. Nothing
-- for a common intake.
local function tenant_of(intake)
  return intake:match('^(tokenyard:{[^}]*}:)intake:(%l+):([%w_.:@-]+)$')
end
