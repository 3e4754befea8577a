-- A whole number from 0 as a ledger has it; 0 where it is none, since a client may have written it.
local function whole(text)
  if not text then return 0 end
  return #text < 9 and tonumber(text:match('^%d+$')) or 0
end
