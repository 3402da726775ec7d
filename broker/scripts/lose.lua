-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- lose(group, reason, first bytes) -> 1, or 0 if nobody is to generate it.
-- The prompt of a group cannot be decoded: the learner feeds it again, what it has produced is void.
-- Touches: everything that a group has, lost, dead.
local g = ARGV[1]
local state = field(g, 'state')
if state ~= 'open' and state ~= 'pool' then return 0 end
call('UNLINK', PROMPT .. g)
if state == 'pool' then
  call('ZREM', POOL, g)
  call('UNLINK', group_key(g))
  call('SADD', LOST, g)
else
  requeue(g)
end
to_dead_letters(g, '', ARGV[2], ARGV[3])
return 1
