-- include: lib_base lib_samples lib_groups
-- close_feed(incarnation, owner, server) -> OK. The learner feeds no more prompts: it may take a last, short batch.
-- Touches: meta.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
call('HSET', META, 'feed_closed', 1)
return redis.status_reply('OK')
