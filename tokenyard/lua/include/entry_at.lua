-- The fields of an entry, or nothing where there is none; nor is there one where the key is no stream.
local function entry_at(stream, entry)
  local found = redis.pcall('XRANGE', stream, entry, entry)
  if not found.err then return found[1] and found[1][2] end
  if not found.err:find('WRONGTYPE') then error(found.err) end
end
