-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- commit(incarnation, owner, server, step, watermark, group...) -> {groups settled by this call, blobs to be freed}
-- Settles the batches pinned to steps below `step`, and the groups named: a durable checkpoint contains them. The
-- learner never feeds groups below the watermark again, so their names are forgotten.
-- Touches: all keys of a group (see settle), pinned, batch:*, settled, dropped.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local n = commit_below(ARGV[4])
for a = 6, #ARGV do n = n + settle_trained(ARGV[a]) end
raise_watermark(ARGV[5])
return { n, call('LLEN', P .. 'garbage') }
