-- include: lib_base lib_arguments
-- scale(pool, 'to' or 'by', workers) -> {workers wanted before, from now on}, or {} where no supervisor has such a pool
-- Only the learner's user may call it: a worker's user may not read `owner`. Touches: wanted; reads: owner, pool:*.
call('GET', PUBLIC .. 'owner')
local pool, manner, workers = worker_name(1), text(2, 'manner', 2), whole(3, 'workers', -4096, 4096)
if call('EXISTS', P .. 'pool:' .. pool) == 0 then return {} end
local before = tonumber(call('HGET', P .. 'wanted', pool)) or 0
local wanted = manner == 'by' and before + workers or workers
wanted = math.max(0, math.min(wanted, 4096))
call('HSET', P .. 'wanted', pool, wanted)
return { before, wanted }
