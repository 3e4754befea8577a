-- The name of the media of a request, by that of its ledger.
local function media_of(ledger)
  return (ledger:gsub(':request:', ':media:', 1))
end
