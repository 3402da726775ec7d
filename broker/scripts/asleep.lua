-- include: lib_base lib_arguments
-- flags: allow-oom
-- asleep(worker, session) -> OK. The worker's engine holds no memory on the device any more. Touches: awake.
call('ZREM', P .. 'awake', worker_name(1) .. ' ' .. text(2, 'session', 64))
return redis.status_reply('OK')
