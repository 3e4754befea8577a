-- The place of a request by its ledger (state, sid, intake, entry, worker): the intake in which it
-- waits, or its worker, and the entry there; nil where it is over. A ledger with an invalid place,
-- which a client can write, gives '' twice.
local place_of
do
  local MOST = '18446744073709551615'

  local function is_entry(text)
    local ms, number = text:match('^(%d+)%-(%d+)$')
    if not ms then return false end
    for _, half in ipairs({ms, number}) do
      if #half > #MOST or #half == #MOST and half > MOST then return false end
    end
    return true
  end

  place_of = function(known)
    local CLASSES = {high = true, normal = true, low = true, retry = true}
    local MOST_TENANT = 90
    local where, entry = known[5], known[4]
    if known[1] == 'waiting' then
      local is_back = (known[3] or '') ~= ''
      local at = is_back and known[3] .. '/' .. (entry or '') or known[2] or ''
      where, entry = at:match('^([^/]*)/(.*)$')
      local class, tenant = (where or ''):match('^(%l+):?(.*)$')
      if not CLASSES[class] or where ~= class and (class == 'retry' or tenant == ''
        or #tenant > MOST_TENANT) then return '', '' end
    elseif known[1] ~= 'assigned' then
      return nil
    end
    if not (where or ''):find('^[%w_.:@-]+$') or not is_entry(entry or '') then return '', '' end
    return where, entry
  end
end
