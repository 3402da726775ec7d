-- include: lib_base lib_samples lib_groups
-- sweep(incarnation, owner, server, n, last) -> {blob...} at most 1000 to be freed by the caller, who has freed the n
-- before, of which this was the last one (a lost reply makes him say so twice).
-- Touches: garbage.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local n = tonumber(ARGV[4])
if n > 0 and call('LINDEX', P .. 'garbage', n - 1) == ARGV[5] then call('LTRIM', P .. 'garbage', n, -1) end
return call('LRANGE', P .. 'garbage', 0, 999)
