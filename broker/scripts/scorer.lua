-- include: lib_base lib_arguments lib_scoring
-- flags: allow-oom
-- scorer(process, ttl in ms, frame | '') -> OK
-- Stores a scorer process's report of itself for `ttl`, two minutes at most; '': the process leaves.
-- Touches: scoring:*; reads scoring.
fence_scorer()
local process, ttl_ms, MOST = scorer_name(1), math.min(whole(2, 'ttl', 1, 1000000000), 120000), 1024
local frame, key = text(3, 'frame', 16384), SCORING .. 'scorer:' .. process
if frame == '' then
  call('UNLINK', key)
  call('SREM', SCORERS, process)
  return redis.status_reply('OK')
end
if call('SISMEMBER', SCORERS, process) == 0 and call('SCARD', SCORERS) >= MOST then
  for _, name in ipairs(call('SMEMBERS', SCORERS)) do
    if call('EXISTS', SCORING .. 'scorer:' .. name) == 0 then call('SREM', SCORERS, name) end
  end
  if call('SCARD', SCORERS) >= MOST then refuse('scorer: ' .. MOST .. ' are alive') end
end
call('SET', key, frame, 'PX', ttl_ms)
call('SADD', SCORERS, process)
call('EXPIRE', SCORERS, A_DAY)
return redis.status_reply('OK')
