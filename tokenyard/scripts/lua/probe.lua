#!lua
-- Check whether the server takes writes; nothing is changed.
--
-- KEYS[1] intake:retry (stream): only named, as a key that every caller may write to
-- Returns the length of the key's name
-- Atomic, because a server that is full, cannot write to its disk or is a replica has to refuse
-- it before it begins, as it refuses every script that may write.

return #KEYS[1]
