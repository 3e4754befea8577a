-- Append replies (msgpack maps) to a reply stream: `flat` gives each an entry of its own with
-- plain fields, `frame` packs all into one entry, as a msgpack array.
local function add_replies(destination, kind, items, maxlen)
  if #items == 0 then return end
  if kind == 'frame' then
    local frame = string.char(0xdd) .. struct.pack('>I4', #items) .. table.concat(items)
    redis.call('XADD', destination, 'MAXLEN', '~', maxlen, '*', 'frame', frame)
    return
  end
  for _, item in ipairs(items) do
    local fields = {}
    for name, value in pairs(cmsgpack.unpack(item)) do
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
    redis.call('XADD', destination, 'MAXLEN', '~', maxlen, '*', unpack(fields))
  end
end
