#!lua flags=allow-oom
-- Return the first entries of guests' inboxes, and delete those that are too large to be read.
--
-- KEYS[1...] inbox:<guest> (stream), one for each guest
-- ARGV[1] most bytes of memory that an inbox may take
-- ARGV[2] most bytes of an entry
-- ARGV[3] most fields of an entry
-- ARGV[4] most entries to give of an inbox
-- Returns for each inbox the bytes that it took where it was deleted unread, else 0; how many
--   entries were deleted as too long or too wide; and the first entries that are left
-- Atomic, because an entry must be looked at before anybody reads it: it may have gigabytes, or
--   millions of fields.

-- No entry can follow this id, which a guest may choose.
local HIGHEST = '18446744073709551615-18446744073709551615'
local most_memory, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local most_fields, most_entries = tonumber(ARGV[3]), tonumber(ARGV[4])

local function is_sound(fields)
  if #fields > 2 * most_fields then return false end
  local size = 0
  for _, text in ipairs(fields) do size = size + #text end
  return size <= most_bytes, size
end

local function read(inbox)
  local entries, deleted, bytes, after = {}, 0, 0, '-'
  while #entries < most_entries and deleted < most_entries and bytes < most_bytes do
    local entry = redis.call('XRANGE', inbox, after, '+', 'COUNT', 1)[1]
    if not entry then break end
    local sound, size = is_sound(entry[2])
    if sound then
      entries[#entries + 1] = entry
      bytes = bytes + size
    else
      redis.call('XDEL', inbox, entry[1])
      deleted = deleted + 1
    end
    if entry[1] == HIGHEST then break end
    after = '(' .. entry[1]
  end
  return {0, deleted, entries}
end

local hauls = {}
for i = 1, #KEYS do
  local memory = redis.call('MEMORY', 'USAGE', KEYS[i], 'SAMPLES', 0) or 0
  if memory > most_memory then
    redis.call('UNLINK', KEYS[i])
    hauls[i] = {memory, 0, {}}
  else
    hauls[i] = read(KEYS[i])
  end
end
return hauls
