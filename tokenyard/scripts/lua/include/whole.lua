-- A whole number in a ledger; 0 where it is invalid, since a client may have written it.
local function whole(text)
  if not text then return 0 end
  return #text < 9 and tonumber(text:match('^%d+$')) or 0
end
