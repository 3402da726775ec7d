-- With this begins every function that includes lib_base. KEYS[1] ends with `of:IDENTITY`, which tells to which run of that
-- name the caller belongs. What the files keep for one call is forgotten (`_STATE` in broker/connection/verbs.py declares it).
call, KEYS, ARGV, is_there, forks, highest = redis.call, keys, arguments, nil, nil, nil
IDENTITY = string.match(KEYS[1], ':of:(%x*)$')

-- A run that was deleted or overwritten is not the one that has its name now: nothing of it may reach that one. (While a
-- cluster moves the run to another node, a script fails at the first key that is not there: here, before it has written.)
local held_identity = call('GET', PUBLIC .. 'identity')
if held_identity and held_identity ~= IDENTITY then return redis.error_reply('FOREIGN ' .. held_identity) end
