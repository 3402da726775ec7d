-- include: lib_base lib_samples lib_groups
-- close_feed(incarnation, owner, server) -> OK. No more prompts will come: the last, short batch may be taken.
-- Touches: meta.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
call('HSET', META, 'feed_closed', 1)
return redis.status_reply('OK')
