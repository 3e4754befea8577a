-- The windows over which a tenant's tokens are counted, each a ring of buckets in `tenant:<name>`:
-- field `<mark><bucket % count>`, value `<bucket> <tokens>`. A window slides by one bucket, and counts
-- one more than it is long, so that no span of that length has more than the limit.
local function token_windows()
  return {
    {limit = 'tokens_per_minute', mark = 'm', width = 5000, count = 13},
    {limit = 'tokens_per_day', mark = 'd', width = 1800000, count = 49},
  }
end
