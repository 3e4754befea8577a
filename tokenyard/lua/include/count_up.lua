-- One more of something in a ledger. What a client has written there that is no whole number from 0 is
-- none.
local function count_up(ledger, field)
  local count = redis.call('HMGET', ledger, field)[1] or ''
  redis.call('HSET', ledger, field, (#count < 9 and tonumber(count:match('^%d+$')) or 0) + 1)
end
