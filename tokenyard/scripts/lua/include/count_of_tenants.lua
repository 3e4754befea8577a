-- Add to what waits in the intakes of all tenants, and to that of a class.
-- @include keep_count
local function count_of_tenants(tally, class, number)
  keep_count(tally, 'tenants_waiting', number)
  keep_count(tally, 'tenants_waiting:' .. class, number)
end
