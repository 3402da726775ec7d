-- include: lib_base lib_arguments lib_tokens
-- flags: allow-oom
-- heartbeat(worker, session, ttl in ms, frame, is serving, ttl_s of leases, {member, token}...)
--   -> {1, or 2 where the worker was asked to drain, or 0 where the name belongs to another session; state; number of
--   serving workers, this one included; token of a lease that the worker has lost...}
-- Renews leases first: a report that is refused costs no lease. A copy lasts until its sample is done.
-- The worker counts as alive for `ttl`, two minutes at most, and as serving or not. Its name stays its own for two
-- minutes, so that no other process takes it from a worker that is held up.
-- Touches: worker:*, session:*, workers, serving, leases, retry; reads: dismissed, group:*.
local lost = #ARGV > 6 and renew_leases(6) or {}
local worker, session, LONGEST_MS = worker_name(1), text(2, 'session', 64), 120000
local ttl_ms = math.min(whole(3, 'ttl', 1, 1000000000), LONGEST_MS)
local frame = text(4, 'frame', 16384) -- the frames of all workers go into one answer
local WORKERS, SERVING, MOST = P .. 'workers', P .. 'serving', 4096

-- Forgets the workers whose session has expired, to make room for others.
local function forget_dead()
  for _, name in ipairs(call('SMEMBERS', WORKERS)) do
    if call('EXISTS', P .. 'session:' .. name) == 0 then
      call('SREM', WORKERS, name)
      call('SREM', SERVING, name)
    end
  end
end

local state = meta('state') or 'absent'
if is_of_another(worker, session) then return { 0, state, call('SCARD', SERVING) + 1, unpack(lost) } end
if call('SISMEMBER', WORKERS, worker) == 0 then
  if call('SCARD', WORKERS) >= MOST then forget_dead() end
  if call('SCARD', WORKERS) >= MOST then refuse('worker: ' .. MOST .. ' are alive') end
end
call('SET', P .. 'session:' .. worker, session, 'PX', LONGEST_MS)
call('SET', P .. 'worker:' .. worker, frame, 'PX', ttl_ms)
call('SADD', WORKERS, worker)
call(ARGV[5] == '1' and 'SADD' or 'SREM', SERVING, worker)
for _, names in ipairs({ WORKERS, SERVING }) do call('EXPIRE', names, 86400) end
local serving = call('SCARD', SERVING) + (ARGV[5] == '1' and 0 or 1)
return { call('HGET', P .. 'dismissed', worker) == session and 2 or 1, state, serving, unpack(lost) }
