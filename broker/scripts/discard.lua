-- include: lib_base
-- discard(member, token, reason, first bytes) -> 1, or 0 if the lease is no longer held.
-- The segments of a sample cannot be decoded: its holder begins anew, the bytes go to the dead-letter stream.
-- Touches: meta, group:*, segments:*, segment:*, dead.
free_first()
local g, round, i = parse(ARGV[1])
local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'oldest:' .. i)
if had[1] ~= round or had[2] ~= ARGV[2] then return 0 end
if had[3] then discard_segments(g, ARGV[1], i) end
to_dead_letters(ARGV[1], ARGV[3], ARGV[4])
return 1
