-- include: lib_base lib_arguments
-- flags: allow-oom
-- discard(member, token, index of a segment or -1, reason, first bytes) -> 1, or 0 if the lease is no longer held.
-- Frees all segments of a sample after which its holder cannot go on (-1: it cannot go on after its own continuation
-- either); the holder begins anew. The first bytes go to the dead-letter stream, with the name of the worker that
-- appended the segment. Only the reader says that a segment is bad, so no worker is blamed for it.
-- Touches: meta, group:*, segments:*, segment:*, dead.
local g, round, i = sample(1)
local index = whole(3, 'index', -1, 1000000)
local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'oldest:' .. i, 'by:' .. i)
if had[1] ~= round or had[2] ~= ARGV[2] then return 0 end
local entry, author = index >= 0 and call('LINDEX', segments_key(ARGV[1]), index), name_of(had[4])
if index >= 0 then author = entry and select(4, parse_segment(entry)) or '' end
if had[3] then discard_segments(g, ARGV[1], i) end
to_dead_letters(ARGV[1], author, quoted(4, 2000), quoted(5, 256))
return 1
