-- include: lib_base lib_arguments
-- flags: allow-oom
-- heartbeat(worker, session, ttl in ms, frame, is serving) -> 1, or 0 where another session of that name is alive
-- The worker is alive for so long, and among those that generate or not. Touches: worker:*, session:*, workers, serving.
local worker, session, ttl_ms = worker_name(1), text(2, 'session', 64), whole(3, 'ttl', 1, 3600000)
local frame = text(4, 'frame', 16384) -- all of them come in one answer
local WORKERS, SERVING, MOST = P .. 'workers', P .. 'serving', 4096

-- Names of those not heard of any more make room for others'.
local function forget_dead()
  for _, name in ipairs(call('SMEMBERS', WORKERS)) do
    if call('EXISTS', P .. 'worker:' .. name) == 0 then
      call('SREM', WORKERS, name)
      call('SREM', SERVING, name)
    end
  end
end

if call('SISMEMBER', WORKERS, worker) == 0 then
  if call('SCARD', WORKERS) >= MOST then forget_dead() end
  if call('SCARD', WORKERS) >= MOST then refuse('worker: ' .. MOST .. ' are alive') end
end
if (call('GET', P .. 'session:' .. worker) or session) ~= session then return 0 end
call('SET', P .. 'session:' .. worker, session, 'PX', ttl_ms)
call('SET', P .. 'worker:' .. worker, frame, 'PX', ttl_ms)
call('SADD', WORKERS, worker)
call(ARGV[5] == '1' and 'SADD' or 'SREM', SERVING, worker)
for _, names in ipairs({ WORKERS, SERVING }) do call('EXPIRE', names, 86400) end
return 1
