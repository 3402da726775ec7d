-- include: lib_base lib_arguments lib_samples lib_groups lib_evaluations
-- flags: allow-oom
-- evaluation_submit(version, sample, token, oldest version, newest version, passed, reward, response tokens) -> outcome
-- Hands in the result of an evaluation's sample. The first one under the sample's newest lease counts. A sample that
-- other weights sampled too does not: any worker with the version may have it next.
-- Touches: evaluating:*, evaluation:*.
local version, i, token = text(1, 'version', 50), whole(2, 'sample', 0, 2147483647), text(3, 'token', 64)
local oldest, newest, passed = text(4, 'version', 50), text(5, 'version', 50), whole(6, 'passed', 0, 1)
local reward, tokens = text(7, 'reward', 32), whole(8, 'tokens', 0, 2147483647)
if not string.match(reward, '^%-?%d+%.?%d*e?[+-]?%d*$') or not tonumber(reward) or math.abs(reward) == math.huge then
  refuse('reward')
end
local key, queue = evaluation_key(version), evaluating_key(version)
if call('HGET', key, 'token:' .. i) ~= token then return 'fenced' end
if not call('ZSCORE', queue, i) then return 'duplicate' end
call('HSET', key, 'seen', now())
if oldest ~= version or newest ~= version then
  call('ZADD', queue, 0, i)
  call('HDEL', key, 'token:' .. i)
  call('HINCRBY', key, 'mixed', 1)
  return 'other version'
end
call('ZREM', queue, i)
call('HSET', key, 'result:' .. i, table.concat({ passed, reward, tokens }, ' '))
call('HINCRBY', key, 'done', 1)
return 'accepted'
