-- Whether the fields of an entry (see `entry_fields`) are those of the request of this ledger.
local function is_of(fields, ledger)
  local client = fields['client'] or ''
  local name = (client ~= '' and client or 'anon') .. '/' .. (fields['id'] or '')
  return ledger:match('^tokenyard:{[^}]*}:request:(.*)$') == name
end
