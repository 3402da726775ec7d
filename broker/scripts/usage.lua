-- include: lib_base lib_workers
-- flags: no-writes allow-oom
-- usage() -> {seconds since the run was last used, meta, {newest StepMetrics frame}, workers alive}
-- Reads: meta, steps, workers, worker:*.
local idle = call('OBJECT', 'IDLETIME', META) -- first: the reads below set it to 0
return { idle or 0, call('HGETALL', META), call('LRANGE', P .. 'steps', -1, -1), #alive_workers() / 2 }
