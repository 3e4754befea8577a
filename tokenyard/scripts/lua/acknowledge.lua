#!lua flags=allow-oom
-- A controller reports the outcome of a command.
--
-- KEYS[1] acks:<command> (hash): the outcome (JSON), by worker
-- KEYS[2] events (stream)
-- ARGV[1] the worker
-- ARGV[2] the outcome (JSON)
-- Returns nothing
-- Atomic, because an acknowledgement that does not expire would stay forever.

local KEPT_S = 3600
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], KEPT_S)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'event', 'command', 'worker', ARGV[1])
