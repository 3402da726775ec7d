-- include: lib_base
-- flags: allow-oom
-- awake(worker, ttl_s, is awake) -> 1 if engines may generate now, else 0
-- If they may, or the worker says that its engine is awake still, it counts as awake for `ttl_s` seconds: once the phase
-- is over nobody else joins those whom the learner waits for. Touches: phase, awake.
local AWAKE, may = P .. 'awake', call('GET', P .. 'phase') == server_id()
if may or ARGV[3] == '1' then
  call('ZADD', AWAKE, now() + tonumber(ARGV[2]), ARGV[1])
  call('EXPIRE', AWAKE, 86400)
end
return may and 1 or 0
