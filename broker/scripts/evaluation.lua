-- include: lib_base lib_samples lib_groups lib_evaluations
-- flags: allow-oom
-- evaluation(incarnation, owner, server, version, what: look, end or skip)
--   -> {} where there is none, or {samples, samples done, samples that had tokens of other versions,
--       seconds since a worker had a sample for no longer than it keeps the version, {sample, result}...}
-- Tells how far an evaluation is, with the results once all samples are done. `end` forgets the evaluation; so does
-- `skip`, which counts it as one without a result, a repeated call once: the learner skips each version once, in order.
-- Touches: meta, evaluations, evaluation:*, evaluating:*, begun:*, prompt:evaluation:*.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local version = ARGV[4]
if ARGV[5] == 'skip' and meta('skipped_evaluation') ~= version then
  call('HSET', META, 'skipped_evaluation', version)
  count('skipped_evaluations')
end
if ARGV[5] ~= 'look' then forget_evaluation(version) return {} end
local size, done, mixed, seen = unpack(call('HMGET', evaluation_key(version), 'size', 'done', 'mixed', 'seen'))
if not size then return {} end
local reply = { tonumber(size), tonumber(done), tonumber(mixed), tostring(math.max(0, now() - seen)) }
if size == done then
  for i = 0, size - 1 do reply[#reply + 1] = call('HGET', evaluation_key(version), 'result:' .. i) end
end
return reply
