-- include: lib_base lib_samples lib_groups lib_evaluations lib_claim
-- flags: allow-oom
-- claim(checkpoint incarnation, checkpoint step, resume, new owner, config, replayable to, regenerate,
--       watermark, n rules, {rule, value} * n, group...)
--   -> {incarnation, server id, announced step | '', committed step, is rewound, {incarnation, forked to}...}
-- Makes the caller the run's owner. The groups that its checkpoint contains (all below the watermark, and those named)
-- are settled; batches of later steps stay pinned. Where more was committed than the checkpoint contains, the claimant
-- trains those steps again from its own log (`replayable to`), or else the run forgets them: their groups are fed and
-- generated anew. With `regenerate`, all groups that are not in the checkpoint are generated anew.
-- Touches: meta, identity, owner, verbs, config, broadcast, model, manifest:*, archive, archive:*,
-- evaluations, evaluation:*, evaluating:*; what commit does.
local step, owner, mark = tonumber(ARGV[2]), ARGV[4], ARGV[8]
local announced, committed = announced_step(), number('committed_step')
local reached = math.max(announced or 0, committed)
local last = call('ZRANGE', PINNED, -1, -1)[1]
if last then reached = math.max(reached, tonumber(last) + 1) end
local is_anew = ARGV[7] == '1'
local is_rewound = is_anew or (step < committed and tonumber(ARGV[6]) < committed)

if call('GET', PUBLIC .. 'owner') ~= redis.sha1hex(owner) then -- else this repeats a claim whose reply was lost
  -- Resuming without a checkpoint starts from the first step, too, so it is refused once something was committed.
  if step == 0 and reached > 0 and (ARGV[3] ~= '1' or committed > 0) and ARGV[6] == '0' then
    return redis.error_reply('ADVANCED ' .. reached)
  end
  call('HSET', META, 'incarnation', math.max(number('incarnation'), tonumber(ARGV[1])) + 1)
  call('SET', PUBLIC .. 'owner', redis.sha1hex(owner))
  call('SET', PUBLIC .. 'identity', IDENTITY)
  call('HSET', META, 'state', 'claimed', 'feed_closed', 0, 'is_rewound', is_rewound and 1 or 0,
    'claimed_at', now())
  call('HDEL', META, 'waiting_since')
  call('HSETNX', META, 'started', now())
  for a = 10, 8 + 2 * ARGV[9], 2 do call('HSET', META, ARGV[a], ARGV[a + 1]) end
  store_config(ARGV[5])
  -- Another version of Headway stored these for all roles; this version cannot read them.
  if string.match(call('GET', PUBLIC .. 'verbs') or '', '^%S+') ~= string.match(VERBS, '^%S+') then
    for _, name in ipairs({ 'broadcast', 'model', 'manifest:offered', 'manifest:announced' }) do
      call('UNLINK', PUBLIC .. name)
    end
  end
  call('SET', PUBLIC .. 'verbs', VERBS)
  forget_archive()
  forget_evaluations()
  if is_rewound then forget(mark, step) end
  commit_below(step)
  if is_anew then generate_anew() end
  settle_contained(mark, 10 + 2 * ARGV[9], #ARGV)
  if number('incarnation') > 1 then
    local is_same_server = meta('adopted') == server_id()
    fork(number('incarnation'), reproducible(step, tonumber(ARGV[6]), is_rewound, {}, is_same_server))
  end
  call('HSET', META, 'adopted', server_id())
  renumber(step)
end
return { number('incarnation'), server_id(), announced and tostring(announced) or '', committed, number('is_rewound'),
  call('HGETALL', FORKS) }
