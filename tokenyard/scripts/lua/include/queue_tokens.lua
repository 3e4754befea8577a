-- Add to the tokens that wait, and where they are in a tenant's intake also to those of all tenants: the
-- rest is what waits without a tenant.
-- @include count_in
-- @include keep_count
-- @include tenant_of
local function queue_tokens(tally, intake, number)
  count_in(tally, 'queued_tokens', number)
  if tenant_of(intake) then keep_count(tally, 'tenants_queued_tokens', number) end
end
