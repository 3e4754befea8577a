#!lua flags=allow-oom
-- Send a command for a worker to its controller.
--
-- KEYS[1] leader (string): "<epoch>:<coordinator>"
-- KEYS[2] control (stream)
-- ARGV[1] the caller's leader token, or '' for an operator, who needs none
-- ARGV[2...] the fields of the entry and their values
-- Returns the command's id, or '' where another leads
-- Atomic, because a former leader must not work against its successor.

if ARGV[1] ~= '' and redis.call('GET', KEYS[1]) ~= ARGV[1] then return '' end
return redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', unpack(ARGV, 2))
