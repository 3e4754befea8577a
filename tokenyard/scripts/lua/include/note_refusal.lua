-- Note in a ledger that the fence has refused what a worker wrote of its attempt, `tokens` or a `result`:
-- how often it has, and the last time. An attempt whose request has ended under it is not refused: it was
-- cancelled, or has finished already.
-- @include count_up
-- @include server_ms
local function note_refusal(ledger, worker, attempt, what)
  local owner = redis.call('HMGET', ledger, 'worker', 'attempt', 'state')
  local is_own = owner[1] == worker and owner[2] == attempt
  if not owner[3] or (is_own and owner[3] ~= 'assigned') then return end
  count_up(ledger, 'refusals')
  redis.call('HSET', ledger, 'refused', server_ms() .. ' ' .. worker .. ' ' .. attempt .. ' ' .. what)
end
