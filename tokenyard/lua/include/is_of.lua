-- Whether what an entry says (see `wish_of`) is the request of this ledger.
local function is_of(wish, ledger)
  local client = wish['client'] or ''
  local name = (client ~= '' and client or 'anon') .. '/' .. (wish['id'] or '')
  return ledger:match('^tokenyard:{[^}]*}:request:(.*)$') == name
end
