-- Increment a count in a ledger. An invalid count, which a client may write, is 0.
local function count_up(ledger, field)
  local count = redis.call('HMGET', ledger, field)[1] or ''
  redis.call('HSET', ledger, field, (#count < 9 and tonumber(count:match('^%d+$')) or 0) + 1)
end
