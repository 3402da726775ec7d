-- include: lib_base lib_arguments
-- flags: allow-oom
-- awake(worker, session, ttl_s, is awake) -> 1 if engines may generate now, else 0
-- If engines may generate, or the worker says that its engine is still awake, the worker counts as awake for `ttl_s`
-- seconds. Once the phase is over, no further worker joins those that the learner waits for. Touches: phase, awake.
local worker, session, ttl_s = worker_name(1), text(2, 'session', 64), seconds(3, 60)
local AWAKE, may, MOST = P .. 'awake', call('GET', P .. 'phase') == server_id(), 4096
if may or ARGV[4] == '1' then
  local holder = worker .. ' ' .. session
  if call('ZCARD', AWAKE) >= MOST and not call('ZSCORE', AWAKE, holder) then
    for _, other in ipairs(call('ZRANGEBYSCORE', AWAKE, '-inf', now())) do call('ZREM', AWAKE, other) end
    if call('ZCARD', AWAKE) >= MOST then refuse('worker: ' .. MOST .. ' are awake') end
  end
  call('ZADD', AWAKE, now() + ttl_s, holder)
  call('EXPIRE', AWAKE, 86400)
end
return may and 1 or 0
