#!lua flags=no-writes
-- Scan some entries of an intake on the server for requests past their deadline.
--
-- KEYS[1] intake:<class> (stream)
-- ARGV[1] the entry after which to begin, or '-' for the first
-- ARGV[2] most entries to read
-- Returns the last entry read, or '' at the end of the stream, then the overdue entries
-- Atomic by itself: nothing is changed.

-- @include server_ms
-- @include entry_fields

-- Requests of one client mostly have the same `common`, and parsing it costs more than all the rest:
-- each text is parsed once.
local deadlines = {}
local function common_deadline(common)
  if deadlines[common] == nil then
    deadlines[common] = tonumber(entry_fields({'common', common})['deadline']) or false
  end
  return deadlines[common]
end

local function deadline_of(fields)
  local own, common
  for i = 1, #fields, 2 do
    if fields[i] == 'deadline' then own = fields[i + 1] end
    if fields[i] == 'common' then common = fields[i + 1] end
  end
  if own or not common then return tonumber(own) end
  return common_deadline(common)
end

local from = ARGV[1] == '-' and '-' or '(' .. ARGV[1]
local entries = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', ARGV[2])
local replies, now = {''}, server_ms()
for _, item in ipairs(entries) do
  local deadline = deadline_of(item[2])
  if deadline and deadline < now then replies[#replies + 1] = item[1] end
end
if #entries == tonumber(ARGV[2]) then replies[1] = entries[#entries][1] end
return replies
