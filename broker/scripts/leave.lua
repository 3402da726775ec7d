-- include: lib_base lib_arguments
-- flags: allow-oom
-- leave(worker, session) -> OK. It is gone on purpose: at once no longer among the workers; others' names it cannot take away.
-- Touches: worker:*, session:*, workers, serving.
local worker = worker_name(1)
if not is_of_another(worker, ARGV[2]) then
  call('UNLINK', P .. 'worker:' .. worker, P .. 'session:' .. worker)
  for _, names in ipairs({ 'workers', 'serving' }) do call('SREM', P .. names, worker) end
end
return redis.status_reply('OK')
