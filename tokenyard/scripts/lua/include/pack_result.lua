-- A result as a msgpack map, for a request that ends without an engine.
local function pack_result(id, status, tokens, problem)
  local function text(value) return string.char(0xdb) .. struct.pack('>I4', #value) .. value end
  return string.char(0x86) .. text('id') .. text(id) .. text('event') .. text('result')
    .. text('seq') .. string.char(0xce) .. struct.pack('>I4', #tokens / 4)
    .. text('tokens') .. string.char(0xc6) .. struct.pack('>I4', #tokens) .. tokens
    .. text('status') .. text(status) .. text('error') .. text(problem)
end
