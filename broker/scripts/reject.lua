-- include: lib_base lib_samples lib_groups
-- reject(incarnation, owner, server, step, group, round, member, reason, first bytes, is prompt) -> 1, or 0 if not pinned.
-- A payload of a pinned group, or its prompt (1), cannot be decoded: the group is generated anew (its prompt fed again),
-- the bytes go to the dead-letter stream. Touches: meta, pinned groups' queues (see requeue), prompt:*, lost, dead.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
free_first()
local g = ARGV[5]
if field(g, 'pin') ~= ARGV[4] or field(g, 'round') ~= ARGV[6] then return 0 end
if ARGV[10] == '1' then call('UNLINK', P .. 'prompt:' .. g) end
requeue(g)
give_up_reproducing(tonumber(ARGV[4]))
to_dead_letters(ARGV[7], ARGV[8], ARGV[9])
return 1
