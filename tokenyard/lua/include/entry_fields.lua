-- What an entry says, by name: its own fields, and those in its field `common`, which count where
-- there is none of its own. Anybody may have written it: what cannot be read says nothing.
local function entry_fields(fields)
  local named = {}
  for i = 1, #fields, 2 do named[fields[i]] = fields[i + 1] end
  if not named['common'] then return named end
  local is_read, common = pcall(cjson.decode, named['common'])
  if is_read and type(common) == 'table' then
    for name, value in pairs(common) do
      if named[name] == nil and type(value) == 'string' then named[name] = value end
    end
  end
  return named
end
