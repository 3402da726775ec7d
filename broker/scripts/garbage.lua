-- include: lib_base lib_samples lib_groups
-- garbage(incarnation, owner, server, n, last) -> {blob...}, at most 1000, which the caller must free
-- The caller has freed the first n blobs of the garbage list, and `last` is the n-th. Where the reply was lost it says
-- so twice; `last` keeps a second call from removing others. Touches: garbage.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local n = tonumber(ARGV[4])
if n > 0 and call('LINDEX', P .. 'garbage', n - 1) == ARGV[5] then call('LTRIM', P .. 'garbage', n, -1) end
return call('LRANGE', P .. 'garbage', 0, 999)
