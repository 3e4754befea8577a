#!lua flags=no-writes
-- Scan some entries of an intake on the server for requests past their deadline.
--
-- KEYS[1] intake:<class> (stream)
-- ARGV[1] the entry after which to begin, or '-' for the first
-- ARGV[2] most entries to read
-- ARGV[3] the caller's idea of the server's time in ms
-- ARGV[4...] entries up to which the server's clock was another, each with what to add to a deadline
-- Returns the last entry read, or '' at the end of the stream, then the overdue entries
-- Atomic by itself: nothing is changed.

-- @include entry_fields
-- @include is_time

-- Whether the id of a stream entry comes after another.
local function is_after(id, other)
  local ms, seq = id:match('(%d+)-(%d+)')
  local other_ms, other_seq = other:match('(%d+)-(%d+)')
  ms, other_ms = tonumber(ms), tonumber(other_ms)
  return ms > other_ms or ms == other_ms and tonumber(seq) > tonumber(other_seq)
end

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
local now = tonumber(ARGV[3])
if not is_time(now) then return {''} end
local function shift_of(entry)
  local shift = 0
  for a = 4, #ARGV, 2 do
    if not is_after(entry, ARGV[a]) then shift = shift + tonumber(ARGV[a + 1]) end
  end
  return shift
end
local replies = {''}
for _, item in ipairs(entries) do
  local deadline = deadline_of(item[2])
  if deadline and deadline + shift_of(item[1]) < now then replies[#replies + 1] = item[1] end
end
if #entries == tonumber(ARGV[2]) then replies[1] = entries[#entries][1] end
return replies
