-- What an entry says, by name: its own fields, and those in its field `shared`, which count where
-- there is none of its own. Anybody may have written it: what cannot be read says nothing.
local function wish_of(fields)
  local wish = {}
  for i = 1, #fields, 2 do wish[fields[i]] = fields[i + 1] end
  if not wish['shared'] then return wish end
  local is_read, shared = pcall(cjson.decode, wish['shared'])
  if is_read and type(shared) == 'table' then
    for name, value in pairs(shared) do
      if wish[name] == nil and type(value) == 'string' then wish[name] = value end
    end
  end
  return wish
end
