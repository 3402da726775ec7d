-- include: lib_base
-- flags: allow-oom
-- asleep(worker) -> OK. It holds nothing on the device any more. Touches: awake.
call('ZREM', P .. 'awake', ARGV[1])
return redis.status_reply('OK')
