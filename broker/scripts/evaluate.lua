-- include: lib_base lib_samples lib_groups lib_evaluations
-- evaluate(incarnation, owner, server, version, prompts in all, samples of each, keep_s, number of the first,
-- prompt...)
--   -> OK
-- Asks workers for samples of held-out prompts, of which one call gives some: those of `version`, before it is offered.
-- Workers keep the version for `keep_s` seconds at most. Sample I belongs to prompt I / samples, rounded down.
-- Idempotent. Touches: evaluations, evaluation:*, evaluating:*, prompt:evaluation:*.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local version, prompts, samples, first = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[8])
if call('SADD', EVALUATIONS, version) == 1 then
  call('HSET', evaluation_key(version), 'size', prompts * samples, 'samples', samples, 'done', 0, 'mixed', 0,
    'seen', now(), 'keep', ARGV[7])
end
for a = 9, #ARGV do
  local n = first + a - 9
  if call('SET', evaluation_prompt(version, n), ARGV[a], 'NX') then
    for i = n * samples, (n + 1) * samples - 1 do call('ZADD', evaluating_key(version), 0, i) end
  end
end
return redis.status_reply('OK')
