-- Where a ledger says that its request waits, `<class>/<entry>`: that is its server id until it has
-- been given back, and till then there is no `intake`.
local function waits_at(sid, intake, entry)
  return intake and intake .. '/' .. entry or sid
end
