-- include: lib_base lib_arguments lib_samples lib_groups
-- flags: allow-oom
-- mark_lost(member, token, reason, first bytes) -> 1, or 0 if the lease is no longer held, or the prompt is as it was fed.
-- Reports a damaged prompt. The learner feeds the group again, and the samples of its current round are void.
-- Touches: all keys of a group (see requeue), lost, dead.
local g, round, i = sample(1)
local had_round, token, state, digest = fields(g, 'round', 'token:' .. i, 'state', 'prompt')
local prompt = call('GET', PROMPT .. g)
if had_round ~= round or token ~= ARGV[2] or state ~= 'open' then return 0 end
if prompt and redis.sha1hex(prompt) == digest then return 0 end
call('UNLINK', PROMPT .. g)
requeue(g)
to_dead_letters(g, '', quoted(3, 2000), quoted(4, 256))
return 1
