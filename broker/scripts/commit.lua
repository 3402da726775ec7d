-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- commit(incarnation, owner, server, step, watermark, group...) -> {groups settled by this call, blobs to be swept}
-- Every batch pinned to a step below `step` is trained for good, and so are the groups named. Groups below the
-- watermark will never be fed again, so their names are forgotten.
-- Touches: everything that a group has (see settle), pinned, batch:*, settled, dropped.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local n = commit_below(ARGV[4])
for a = 6, #ARGV do n = n + settle_trained(ARGV[a]) end
raise_watermark(ARGV[5])
return { n, call('LLEN', P .. 'garbage') }
