-- The fields of an entry; nil where it is missing, or the key is not a stream.
local function entry_at(stream, entry)
  local found = redis.pcall('XRANGE', stream, entry, entry)
  if not found.err then return found[1] and found[1][2] end
  if not found.err:find('WRONGTYPE') then error(found.err) end
end
