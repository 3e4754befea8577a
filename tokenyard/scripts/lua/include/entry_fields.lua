-- The fields of an untrusted entry by name: its own, and those in its field `common`, of which its
-- own take precedence. What cannot be read is ignored.
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
