-- include: lib_base
-- flags: allow-oom
-- leave(worker) -> OK. It is gone on purpose: at once no longer among the workers. Touches: worker:*, workers, serving.
call('UNLINK', P .. 'worker:' .. ARGV[1])
for _, names in ipairs({ 'workers', 'serving' }) do call('SREM', P .. names, ARGV[1]) end
return redis.status_reply('OK')
