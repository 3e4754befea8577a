-- The estimated tokens of a waiting request: `submit` adds them to the yard's sum, and they are
-- subtracted again. Four bytes of text count as a token.
local function queued_tokens_of(fields)
  for i = 1, #fields, 2 do
    local name = fields[i]
    if name == 'tokens' or name == 'prompt' or name == 'messages' then
      return math.max(1, math.floor(#fields[i + 1] / 4))
    end
  end
  return 0
end
