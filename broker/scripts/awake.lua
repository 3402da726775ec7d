-- include: lib_base lib_arguments
-- flags: allow-oom
-- awake(worker, session, ttl_s, is awake) -> 1 if engines may generate now, else 0
-- If they may, or the worker says that its engine is awake still, it counts as awake for `ttl_s` seconds: once the phase
-- is over nobody else joins those whom the learner waits for. Touches: phase, awake.
local worker, session, ttl_s = worker_name(1), text(2, 'session', 64), seconds(3, 60)
local AWAKE, may = P .. 'awake', call('GET', P .. 'phase') == server_id()
if may or ARGV[4] == '1' then
  call('ZADD', AWAKE, now() + ttl_s, worker .. ' ' .. session)
  call('EXPIRE', AWAKE, 86400)
end
return may and 1 or 0
