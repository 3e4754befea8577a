-- Tokens that a request counts for while it waits, about: what `submit` adds to the yard's sum is what
-- is taken off again. Text counts a token for four bytes.
local function queued_tokens_of(fields)
  for i = 1, #fields, 2 do
    local name = fields[i]
    if name == 'tokens' or name == 'prompt' or name == 'messages' then
      return math.max(1, math.floor(#fields[i + 1] / 4))
    end
  end
  return 0
end
