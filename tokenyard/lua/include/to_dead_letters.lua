-- Keep an entry among the dead letters, with the reason and where it came from. Lua cannot unpack
-- an entry of thousands of fields: its beginning is kept.
local function to_dead_letters(dead, maxlen, fields, reason, sid)
  local letter = {'dead_reason', reason, 'dead_sid', sid}
  for i = 1, math.min(#fields, 200) do letter[#letter + 1] = fields[i] end
  redis.call('XADD', dead, 'MAXLEN', '~', maxlen, '*', unpack(letter))
end
