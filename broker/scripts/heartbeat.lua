-- include: lib_base lib_arguments
-- flags: allow-oom
-- heartbeat(worker, ttl in ms, frame, is serving) -> OK
-- The worker is alive for so long, and among those that generate or not. Touches: worker:*, workers, serving.
local worker, ttl_ms, frame = worker_name(1), whole(2, 'ttl', 1, 3600000), text(3, 'frame', 65536)
local WORKERS, SERVING = P .. 'workers', P .. 'serving'

-- Names of those not heard of any more make room for others'.
local function forget_dead()
  for _, name in ipairs(call('SMEMBERS', WORKERS)) do
    if call('EXISTS', P .. 'worker:' .. name) == 0 then
      call('SREM', WORKERS, name)
      call('SREM', SERVING, name)
    end
  end
end

if call('SADD', WORKERS, worker) == 1 then
  forget_dead()
  call('SADD', WORKERS, worker)
  if call('SCARD', WORKERS) > 4096 then
    call('SREM', WORKERS, worker)
    return redis.error_reply('ARGUMENT worker: 4096 are alive')
  end
end
call('SET', P .. 'worker:' .. worker, frame, 'PX', ttl_ms)
call(ARGV[4] == '1' and 'SADD' or 'SREM', SERVING, worker)
for _, names in ipairs({ WORKERS, SERVING }) do call('EXPIRE', names, 86400) end
return redis.status_reply('OK')
