-- Whether the id of a stream entry comes after another.
local function is_after(id, other)
  local ms, seq = id:match('(%d+)-(%d+)')
  local other_ms, other_seq = other:match('(%d+)-(%d+)')
  ms, other_ms = tonumber(ms), tonumber(other_ms)
  return ms > other_ms or ms == other_ms and tonumber(seq) > tonumber(other_seq)
end
