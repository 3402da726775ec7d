-- The effects of a claim on the run. A re-assertion has them once more where the server has lost the claim.

-- Stores the resolved recipe, and the digest by which workers tell which one they obey.
local function store_config(config)
  call('SET', PUBLIC .. 'config', config)
  call('HSET', META, 'recipe', redis.sha1hex(config))
end

-- Frees the archived weights, which are those of the previous learner.
local function forget_archive()
  for _, name in ipairs(call('SMEMBERS', P .. 'archive')) do call('UNLINK', PUBLIC .. name) end
  call('UNLINK', P .. 'archive')
  call('HDEL', META, 'archive_bytes')
end

-- Forgets all that was trained after the checkpoint: those groups are fed and generated again.
local function forget(mark, step)
  call('UNLINK', SETTLED, DROPPED, GIVEN_UP)
  call('HSET', META, 'watermark', mark, 'committed_step', step)
end

-- Sends back all groups that were sampled and are not in the checkpoint.
local function regenerate()
  for g in pairs(held_groups()) do
    local state = field(g, 'state')
    if state and state ~= 'pool' then requeue(g) end
  end
  call('UNLINK', PINNED)
end

-- Returns the last step whose weights the owner makes again, bit for bit, from the checkpoint of `step`. It trains the
-- batches that it has `taken` since, those of its log (up to `replayable_to`), or those that are pinned. Pinned
-- batches count only where no learner has lost its server since (`is_same_server`): a server that lost its last
-- seconds may have pinned other ones in them. Later weights the owner makes from other batches than an earlier
-- incarnation did, whether or not this server remembers that they were announced.
local function reproducible(step, replayable_to, is_rewound, taken, is_same_server)
  if is_rewound then return step end
  local reached = step
  local function is_pinned()
    if taken[reached] then return true end
    if not is_same_server then return false end
    local names = call('LRANGE', batch_key(reached), 0, -1)
    for _, g in ipairs(names) do if not is_whole(g) then return false end end
    return #names >= number('groups_per_step')
  end
  while is_pinned() do reached = reached + 1 end
  return math.max(reached, replayable_to)
end

-- claim(checkpoint incarnation, checkpoint step, resume, new owner, config, replayable to, regenerate,
--       watermark, n rules, {rule, value} * n, group...)
--   -> {incarnation, server id, announced step | '', committed step, is rewound, {incarnation, forked to}...}
-- Makes the caller the run's owner. The groups that its checkpoint contains (all below the watermark, and those named)
-- are settled; batches of later steps stay pinned. Where more was committed than the checkpoint contains, the claimant
-- trains those steps again from its own log (`replayable to`), or else the run forgets them: their groups are fed and
-- generated anew. With `regenerate`, all groups that are not in the checkpoint are generated anew.
-- Touches: meta, identity, owner, verbs, config, broadcast, model, manifest:*, archive, archive:*,
-- evaluations, evaluation:*, evaluating:*; what commit does.
verb('claim', { 'allow-oom' }, function()
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
    if is_anew then regenerate() end
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
end)

-- reassert(incarnation, owner, announced incarnation | '', announced step, watermark, committed step, config,
--          replayable to, is rewound, regenerate, n rules, {rule, value} * n, n forks, {incarnation, step} * n,
--          n settled, group * n, {step, group, round, size}...) -> server id
-- Restores all that the learner knows of the run on a server that has restarted, perhaps without its last second.
-- Touches: meta, identity, owner, verbs, config, pool, open, ready, pinned, batch:*, settled, group:*, payload:*,
-- forks.
verb('reassert', { 'allow-oom' }, function()
  local owner = redis.sha1hex(ARGV[2])
  local is_ours = call('GET', PUBLIC .. 'owner') == owner and meta('incarnation') == ARGV[1]
  if not is_ours and number('incarnation') >= tonumber(ARGV[1]) then
    return redis.error_reply('FENCED ' .. number('incarnation'))
  end
  call('SET', PUBLIC .. 'verbs', VERBS)
  if not is_ours then
    call('HSET', META, 'incarnation', ARGV[1], 'state', 'training', 'feed_closed', 0)
    call('SET', PUBLIC .. 'owner', owner)
    call('SET', PUBLIC .. 'identity', IDENTITY)
    call('HSETNX', META, 'started', now())
    store_config(ARGV[7])
  end

  local mark, step, is_rewound, is_anew = ARGV[5], tonumber(ARGV[6]), ARGV[9] == '1', ARGV[10] == '1'
  local a = 11
  local function next_list(width)
    local list, stop = {}, a + tonumber(ARGV[a]) * width
    for b = a + 1, stop do list[#list + 1] = ARGV[b] end
    a = stop + 1
    return list
  end
  local rules = next_list(2)
  for b = 1, #rules, 2 do call('HSET', META, rules[b], rules[b + 1]) end
  local forks = next_list(2)
  local first_settled = a + 1
  next_list(1)
  local first_pinned = a

  if not is_ours then -- the server has lost the claim, so its state is older than that
    if is_rewound then forget(mark, step) end
    if is_anew then regenerate() end
  end
  commit_below(step)
  settle_contained(mark, first_settled, first_pinned - 1)

  local function at_least(name, incarnation, step)
    local held_incarnation, held_step = number(name .. '_incarnation'), tonumber(meta(name .. '_step') or '') or -1
    if incarnation < held_incarnation or (incarnation == held_incarnation and step <= held_step) then return end
    -- The server has lost a rewind. The rewind may have gone to a lower step than this, but the steps between were made
    -- within the second that was lost.
    if name == 'announced' and step < held_step then fork(incarnation, step) end
    call('HSET', META, name .. '_incarnation', incarnation, name .. '_step', step, name .. '_by', owner)
    raise_highest(step)
  end
  if ARGV[3] ~= '' then
    for _, name in ipairs({ 'announced', 'offered' }) do at_least(name, tonumber(ARGV[3]), tonumber(ARGV[4])) end
  end
  local function has_payloads(g, round)
    if field(g, 'round') ~= round or not is_whole(g) then return false end
    for i = 0, size_of(g) - 1 do
      local payload = field(g, 'payload:' .. i)
      if payload and not keep_blob(payload) then return false end
    end
    return true
  end

  -- Pins a group that the learner has trained and not yet committed, so that no worker generates it now, whatever state
  -- the server has it in.
  local function pin_again(step, g, round, size)
    if is_settled(g) then return end
    local state = field(g, 'state')
    if not state or state == 'pool' then
      count('admitted')
      call('ZREM', POOL, g)
      call('HSET', group_key(g), 'size', size, 'index', number('admitted') - number('dropped') - 1)
    elseif has_payloads(g, round) then
      local old = field(g, 'pin')
      if old then call('LREM', batch_key(old), 0, g) end
    else
      clear_round(g)
    end
    call('ZREM', READY, g)
    call('SREM', LOST, g)
    call('HSET', group_key(g), 'round', round, 'state', 'pinned', 'pin', step)
    call('RPUSH', batch_key(step), g)
    call('ZADD', PINNED, step, step)
  end
  local taken = {} -- step -> {group of its batch = true}
  for b = first_pinned, #ARGV, 4 do
    local taken_step = tonumber(ARGV[b])
    taken[taken_step] = taken[taken_step] or {}
    taken[taken_step][ARGV[b + 1]] = true
  end
  if tonumber(ARGV[1]) > 1 then
    -- A server that remembers the claim may have lost that this learner has since given up reproducing a step.
    local forked = is_ours and tonumber(call('HGET', FORKS, ARGV[1]) or '')
      or reproducible(step, tonumber(ARGV[8]), is_rewound, taken, false)
    local known = forked
    for b = 1, #forks, 2 do
      if forks[b] == ARGV[1] then known = math.min(known, tonumber(forks[b + 1]))
      elseif not is_ours then call('HSETNX', FORKS, forks[b], forks[b + 1]) end
    end
    if not is_ours or known < forked then fork(ARGV[1], known) end
  end
  -- The server may remember groups that have left a batch since.
  for taken_step, groups in pairs(taken) do
    for _, g in ipairs(call('LRANGE', batch_key(taken_step), 0, -1)) do if not groups[g] then unpin(g) end end
  end
  for b = first_pinned, #ARGV, 4 do pin_again(ARGV[b], ARGV[b + 1], ARGV[b + 2], ARGV[b + 3]) end

  call('HSET', META, 'adopted', server_id())
  renumber(step)
  return server_id()
end)

-- state(incarnation, owner, server, state) -> OK. Sets the run's state. Touches: meta.
owner_verb('state', {}, function()
  call('HSET', META, 'state', ARGV[4])
  return redis.status_reply('OK')
end)
