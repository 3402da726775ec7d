-- include: lib_base lib_arguments
-- flags: allow-oom
-- discard(member, token, worker, reason, first bytes) -> 1, or 0 if the lease is no longer held.
-- The segments of a sample cannot be gone on from: its holder begins anew, the bytes go to the dead-letter stream, with the
-- worker that appended them. Nobody but their reader says so, hence nobody is blamed for it.
-- Touches: meta, group:*, segments:*, segment:*, dead.
local g, round, i = sample(1)
local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'oldest:' .. i)
if had[1] ~= round or had[2] ~= ARGV[2] then return 0 end
if had[3] then discard_segments(g, ARGV[1], i) end
to_dead_letters(ARGV[1], quoted(3, 100), quoted(4, 2000), quoted(5, 256))
return 1
