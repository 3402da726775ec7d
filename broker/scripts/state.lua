-- include: lib_base lib_samples lib_groups
-- state(incarnation, owner, server, state) -> OK. Sets the run's state. Touches: meta.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
call('HSET', META, 'state', ARGV[4])
return redis.status_reply('OK')
