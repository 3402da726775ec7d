-- include: lib_base lib_arguments
-- flags: allow-oom
-- leave(worker, session) -> OK. The worker stops on purpose and is at once no longer listed. A process cannot remove a
-- worker of another session. Touches: worker:*, session:*, workers, serving, dismissed.
local worker = worker_name(1)
if not is_of_another(worker, ARGV[2]) then
  call('UNLINK', P .. 'worker:' .. worker, P .. 'session:' .. worker)
  for _, names in ipairs({ 'workers', 'serving' }) do call('SREM', P .. names, worker) end
  call('HDEL', P .. 'dismissed', worker)
end
return redis.status_reply('OK')
