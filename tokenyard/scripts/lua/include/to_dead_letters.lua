-- Keep an entry as a dead letter, with the reason and its origin. Lua cannot unpack an entry of
-- thousands of fields: only its beginning is kept.
local function to_dead_letters(dead, maxlen, fields, reason, sid)
  local letter = {'dead_reason', reason, 'dead_sid', sid}
  for i = 1, math.min(#fields, 200) do letter[#letter + 1] = fields[i] end
  redis.call('XADD', dead, 'MAXLEN', '~', maxlen, '*', unpack(letter))
end
