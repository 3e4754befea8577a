-- Count a request as waiting no longer: what `submit` added for it to the yard's sum of queued
-- tokens is taken off again, once. An entry that a client added by itself was never counted.
local function take_queued(info, ledger)
  local queued = redis.call('HGET', ledger, 'queued_tokens')
  if queued and queued ~= '0' then
    redis.call('HINCRBY', info, 'queued_tokens', -tonumber(queued))
    redis.call('HSET', ledger, 'queued_tokens', 0)
  end
end
