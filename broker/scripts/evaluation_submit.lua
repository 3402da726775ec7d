-- include: lib_base lib_arguments lib_samples lib_groups lib_evaluations
-- flags: allow-oom
-- evaluation_submit(version, sample, token, oldest version, newest version, passed, reward, response tokens, holder,
--   its components as JSON) -> outcome
-- Hands in the result of an evaluation's sample. The first one under the sample's newest lease, or a copy, counts. A
-- sample that other weights sampled too does not: any worker with the version may have it next.
-- Touches: evaluating:*, evaluation:*, begun:*; reads session:*.
local version, i, token = text(1, 'version', 50), whole(2, 'sample', 0, 2147483647), text(3, 'token', 64)
local oldest, newest, passed = text(4, 'version', 50), text(5, 'version', 50), whole(6, 'passed', 0, 1)
local reward, tokens, components = text(7, 'reward', 32), whole(8, 'tokens', 0, 2147483647), ARGV[10] or '{}'
if #components > 20000 then refuse('components') end
if not string.match(reward, '^%-?%d+%.?%d*e?[+-]?%d*$') or not tonumber(reward) or math.abs(reward) == math.huge then
  refuse('reward')
end
local key, queue, holder = evaluation_key(version), evaluating_key(version), evaluator(9)
local is_left, is_leased = call('ZSCORE', queue, i), call('HGET', key, 'token:' .. i) == token
if not is_left then return is_leased and 'duplicate' or 'fenced' end
if not is_leased then
  local keep = call('HGET', key, 'keep')
  local is_copy = token == copy_token(version, holder, i) and is_begun(version, i, keep, COPIED_AFTER)
  if not is_copy then return 'fenced' end
end
if oldest ~= version or newest ~= version then
  if is_leased then
    call('ZADD', queue, 0, i)
    call('HDEL', key, 'token:' .. i)
  end
  call('HINCRBY', key, 'mixed', 1)
  return 'other version'
end
call('ZREM', queue, i)
call('ZREM', begun_key(version), i)
call('HSET', key, 'seen', now(), 'token:' .. i, token, 'result:' .. i, table.concat({ passed, reward, tokens, components }, ' '))
call('HINCRBY', key, 'done', 1)
return 'accepted'
