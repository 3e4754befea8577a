-- Fields of an entry that goes from a lane back to the intake: the request as it was, its history
-- as it is now, and the tokens that its readers have already seen.
local function back_fields(fields, tokens, history)
  local published = redis.call('GET', tokens)
  if published then history['published'] = published end
  local out = {}
  for i = 1, #fields, 2 do
    if history[fields[i]] == nil and fields[i] ~= 'published' then
      out[#out + 1] = fields[i]
      out[#out + 1] = fields[i + 1]
    end
  end
  for name, value in pairs(history) do
    out[#out + 1] = name
    out[#out + 1] = value
  end
  return out
end
