-- claim(checkpoint incarnation, checkpoint step, resume, new owner, config, {rule, value}...)
--   -> {incarnation, server id, announced step | ''}
-- Takes the run over from whoever owned it. Batches that the checkpoint contains are committed, later ones stay pinned.
-- Touches: meta, config, and what commit touches.
free_first()
local step, owner = tonumber(ARGV[2]), ARGV[4]
local announced = announced_step()
local reached = math.max(announced or 0, number('committed_step'))
local last = call('ZRANGE', PINNED, -1, -1)[1]
if last then reached = math.max(reached, tonumber(last) + 1) end
if meta('owner') ~= owner then -- else a retry of a claim whose reply was lost
  -- Resuming without a checkpoint is a fresh start too, once something was trained for good.
  if step == 0 and reached > 0 and (ARGV[3] ~= '1' or number('committed_step') > 0) then return redis.error_reply('ADVANCED ' .. reached) end
  call('HSET', META, 'incarnation', math.max(number('incarnation'), tonumber(ARGV[1])) + 1, 'owner', owner)
  call('HSET', META, 'state', 'claimed', 'feed_closed', 0)
  call('HSETNX', META, 'started', now())
  for a = 6, #ARGV, 2 do call('HSET', META, ARGV[a], ARGV[a + 1]) end
  call('SET', P .. 'config', ARGV[5])
  commit_below(step)
  renumber(step)
end
return { number('incarnation'), server_id(), announced and tostring(announced) or '' }
