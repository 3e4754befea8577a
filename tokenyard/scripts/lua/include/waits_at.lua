-- The place of a waiting request by its ledger, `<intake>/<entry>`: its server id until it is handed
-- back, when it gets an `intake`.
local function waits_at(sid, intake, entry)
  return intake and intake .. '/' .. entry or sid
end
