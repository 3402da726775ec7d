-- include: lib_base lib_samples lib_groups
-- sweep(incarnation, owner, server, n) -> {blob...} at most 1000 to be freed by the caller, who has freed the n before.
-- Touches: garbage.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
call('LTRIM', P .. 'garbage', ARGV[4], -1)
return call('LRANGE', P .. 'garbage', 0, 999)
