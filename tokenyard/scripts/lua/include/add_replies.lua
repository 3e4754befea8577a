-- Append replies (msgpack maps) to a reply stream: `flat` gives each an entry of its own with
-- plain fields, `frame` packs all into one entry, as a msgpack array.
local add_replies
do
  -- Bytes of the length or number behind a msgpack tag.
  local WIDTH = {[0xc4] = 1, [0xc5] = 2, [0xc6] = 4, [0xcc] = 1, [0xcd] = 2, [0xce] = 4,
    [0xd9] = 1, [0xda] = 2, [0xdb] = 4, [0xde] = 2}

  -- The number or length at a place, whether it is the length of a string, and what follows.
  local function head(packed, at)
    local tag = packed:byte(at)
    if tag < 0x80 then return tag, false, at + 1 end
    if tag < 0x90 then return tag - 0x80, false, at + 1 end
    if tag > 0x9f and tag < 0xc0 then return tag - 0xa0, true, at + 1 end
    local width = WIDTH[tag]
    local is_number = tag == 0xde or tag > 0xcb and tag < 0xcf
    return struct.unpack('>I' .. width, packed, at + 1), not is_number, at + 1 + width
  end

  -- The names and values of a flat map of strings, binaries and whole numbers from 0. The
  -- servers' own cmsgpack cannot read binaries, and the tokens are one.
  local function plain_fields(packed)
    local fields = {}
    local count, _, at = head(packed, 1)
    for i = 1, 2 * count do
      local value, is_string, after = head(packed, at)
      if is_string then
        value, after = packed:sub(after, after + value - 1), after + value
      end
      fields[i], at = value, after
    end
    return fields
  end

  add_replies = function(destination, kind, items, maxlen)
    if #items == 0 then return end
    if kind == 'frame' then
      local frame = string.char(0xdd) .. struct.pack('>I4', #items) .. table.concat(items)
      redis.call('XADD', destination, 'MAXLEN', '~', maxlen, '*', 'frame', frame)
      return
    end
    for _, item in ipairs(items) do
      redis.call('XADD', destination, 'MAXLEN', '~', maxlen, '*', unpack(plain_fields(item)))
    end
  end
end
