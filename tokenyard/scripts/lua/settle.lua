#!lua flags=allow-oom
-- Delete entries of a guest's inbox, and send the guest their receipts.
--
-- KEYS[1] inbox:<guest> (stream)
-- KEYS[2...] for each reply its stream: reply:<client>/<id> or replies:<client> (stream)
-- ARGV[1] most entries that a reply stream keeps, about
-- ARGV[2] how long a reply can be read at least, in s
-- ARGV[3] number of entries
-- ARGV[4...] the entries; then for each reply its kind, `flat` or `frame`, and the reply (msgpack map)
-- Returns how many entries were there
-- Atomic, because a receipt must be sent only once.

-- @include add_replies
-- @include keep_for

local taken, entries = 0, tonumber(ARGV[3])
for i = 4, 3 + entries do taken = taken + redis.call('XDEL', KEYS[1], ARGV[i]) end
-- Also resets its last id, which a guest may have chosen so high that no other can follow.
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]) end
for i = 2, #KEYS do
  local at = 4 + entries + 2 * (i - 2)
  add_replies(KEYS[i], ARGV[at], {ARGV[at + 1]}, ARGV[1])
  keep_for(KEYS[i], ARGV[2])
end
return taken
