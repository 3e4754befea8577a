-- The server id in a ledger; where that is invalid, the place where the request waits now.
local function sid_of(known, here)
  if not known or known == here then return here end -- nearly always
  return #known < 160 and known:match('^%l+:?[%w_.:@-]*/%d+%-%d+$') or here
end
