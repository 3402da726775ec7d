-- The beginning of every function that includes lib_base. KEYS[1] ends with `of:IDENTITY`, the identity of the run to
-- which the caller belongs. Values that the shared files keep during one call are reset here; `_STATE` in
-- broker/connection/function_library.py declares them.
call, KEYS, ARGV, is_there, forks, highest = redis.call, keys, arguments, nil, nil, nil
clock, has_refused, risen = nil, nil, nil
IDENTITY = string.match(KEYS[1], ':of:(%x*)$')

-- A caller of a run that was deleted or overwritten must not reach the run that has its name now. This is also the
-- first key that is read: while a cluster moves the run to another node, a script fails here, before it has written
-- anything.
local held_identity = call('GET', PUBLIC .. 'identity')
if held_identity and held_identity ~= IDENTITY then return redis.error_reply('FOREIGN ' .. held_identity) end
