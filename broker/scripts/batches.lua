-- The batches of steps, which the learner takes, returns in parts, and commits.

-- take(incarnation, owner, server, step, n)
--   -> {'batch', forked to | '', {group, round, seconds that it waited | '', payload | false...}...} | {'wait', why}
--   | {'exhausted'}
-- Pins n ready groups to the step, those of the oldest weights first. Until the step is committed, the same step gives
-- the same batch again.
-- Touches: meta, tally, pool, retry, leases, open, ready, pinned, batch:*, settled, dropped, given_up, group:*,
-- prompt:*, payload:*, segments:*, segment:*.
owner_verb('take', { 'allow-oom' }, function()
  local step, n, lag = tonumber(ARGV[4]), tonumber(ARGV[5]), number('max_lag')
  local BATCH, on_over_bound, on_straggler = batch_key(ARGV[4]), meta('on_over_bound'), meta('on_straggler')
  local announced = announced_step() or -1

  -- Sends back groups that a re-assertion has pinned and whose payloads are lost: they are generated anew.
  local function drop_undeliverable()
    local is_changed = false
    for _, g in ipairs(call('LRANGE', BATCH, 0, -1)) do
      if not is_whole(g) then
        requeue(g)
        is_changed = true
      end
    end
    if is_changed then give_up_reproducing(step) end
  end

  local function deliver()
    local reply = { 'batch', call('HGET', FORKS, ARGV[1]) or '' }
    for _, g in ipairs(call('LRANGE', BATCH, 0, -1)) do
      local round, size, waited = fields(g, 'round', 'size', 'waited')
      reply[#reply + 1] = { g, round, waited or '', unpack(by_sample(g, 'payload', size)) }
    end
    return reply
  end

  local function send_back(g)
    if on_over_bound == 'drop' then
      settle_dropped(g)
      count('dropped')
    else
      requeue(g)
      count('requeued')
    end
  end

  -- Sends back groups with tokens older than the bound; with `mask` only groups without any younger token.
  local function send_back_old(queue)
    for _, g in ipairs(call('ZRANGEBYSCORE', queue, '-inf', step - lag - 1)) do
      local newest = tonumber(field(g, 'newest') or '')
      if on_over_bound ~= 'mask' or (queue == READY and step - newest > lag) then send_back(g) end
    end
  end

  -- Sends back groups with tokens newer than the next step: the branch of their weights was abandoned. (fork sends back
  -- abandoned groups with older tokens.)
  local function send_back_abandoned(queue)
    for _, g in ipairs(call('ZRANGE', queue, 0, -1)) do
      if (tonumber(field(g, 'newest') or '') or -1) > step then requeue(g) count('requeued') end
    end
  end

  local function floors(queue, first, last)
    local flat, list = call('ZRANGE', queue, first, last, 'WITHSCORES'), {}
    for a = 1, #flat, 2 do
      list[#list + 1] = { group = flat[a], floor = tonumber(flat[a + 1]), open = queue == OPEN }
    end
    return list
  end

  -- Returns true if pinning `need` ready groups now would push an unfinished, older group over the bound: of those
  -- left, the m-th oldest is trained `ceil(m / n)` steps from now at the earliest.
  -- With `mask`, groups that are over the bound already stay, and the learner does not wait for them.
  local function must_wait(ready, need)
    local open, rest = {}, {}
    for _, one in ipairs(floors(OPEN, 0, -1)) do if one.floor >= step - lag then open[#open + 1] = one end end
    if #open == 0 or open[1].floor >= ready[need].floor then return false end
    for _, one in ipairs(floors(READY, need, -1)) do rest[#rest + 1] = one end
    for _, one in ipairs(open) do rest[#rest + 1] = one end
    table.sort(rest, function(a, b)
      if a.floor == b.floor then return a.open and not b.open end
      return a.floor < b.floor
    end)
    local has_open = false
    for m, one in ipairs(rest) do
      has_open = has_open or one.open
      if has_open and one.floor + lag < step + math.ceil(m / n) then return true end
    end
    return false
  end

  -- Gives up the missing samples of a group, which is trained without them.
  local function trim(g)
    local round, size = fields(g, 'round', 'size')
    local oldest = by_sample(g, 'oldest', size)
    for a, payload in ipairs(by_sample(g, 'payload', size)) do
      if not payload then
        local i = a - 1
        local m = member(g, round, i)
        if oldest[a] then discard_segments(g, m, i) end
        call('ZREM', LEASES, m)
        call('ZREM', RETRY, m)
        call('HDEL', group_key(g), 'token:' .. i, 'step:' .. i)
        count('trimmed_samples')
      end
    end
    call('HSET', group_key(g), 'trimmed', 1)
    refloor(g)
    call('ZREM', OPEN, g)
    make_ready(g, field(g, 'floor'), size)
  end

  -- Trims or sends back groups that would be over the bound at the next step.
  local function give_up_stragglers()
    for _, g in ipairs(call('ZRANGEBYSCORE', OPEN, step - lag, step - lag)) do
      if on_straggler == 'trim' and (tonumber(field(g, 'done') or '') or 0) >= number('min_group_size') then
        trim(g)
      else
        requeue(g)
        count('requeued')
      end
    end
  end

  -- Says that the learner waits for samples, since when, and why.
  local function wait_for(what)
    call('HSETNX', META, 'waiting_since', now())
    return { 'wait', what }
  end

  local function pin(ready, need)
    local names = {}
    for a = 1, need do
      local g = ready[a].group
      local since = tonumber(field(g, 'ready_at') or '') or now()
      call('HSET', group_key(g), 'state', 'pinned', 'pin', step, 'waited', math.max(0, now() - since))
      names[a] = g
    end
    for first = 1, need, 1000 do -- bounds the arguments of one command
      local some = { unpack(names, first, math.min(need, first + 999)) }
      call('ZREM', READY, unpack(some))
      call('RPUSH', BATCH, unpack(some))
    end
    call('ZADD', PINNED, step, step)
    call('HSET', META, 'pinned_at', now())
    call('HDEL', META, 'waiting_since')
    -- the step before was trained
    for _, g in ipairs(call('LRANGE', batch_key(step - 1), 0, -1)) do raise_standing(g, size_of(g)) end
  end

  local function nothing_more_comes()
    if meta('feed_closed') ~= '1' then return false end
    local waiting = call('ZCARD', POOL) + call('ZCARD', RETRY) + call('SCARD', LOST)
    return waiting + call('ZCARD', LEASES) + call('ZCARD', OPEN) == 0
  end

  -- Returns true if no sample is under way and no batch waits for its commit, so that the stored bytes cannot shrink.
  local function nothing_can_free()
    return call('ZCARD', RETRY) + call('ZCARD', LEASES) + call('ZCARD', OPEN) + call('ZCARD', PINNED) == 0
  end

  drop_undeliverable()
  local pinned = call('LLEN', BATCH)
  local need = n - pinned
  -- A replayed step gets no further groups: samples generated now are of newer weights than those that the step trains.
  if need <= 0 or (pinned > 0 and step < announced) then return deliver() end
  if step < announced then return { 'wait', 'rewind' } end

  for _, queue in ipairs({ READY, OPEN }) do
    send_back_old(queue)
    if announced <= step and number('newest_step') > step then send_back_abandoned(queue) end
  end
  local ready = floors(READY, 0, need - 1)
  if #ready < need then
    if not nothing_more_comes() then
      local stored, cap = number('payload_bytes') + number('archive_bytes'), number('max_bytes')
      if stored >= cap then
        local full = 'FULL ' .. stored .. ' ' .. cap
        if nothing_can_free() then return redis.error_reply(full) end
        return { 'wait', 'bytes' }
      end
      -- a server that is new, or lost its last seconds, needs this learner's announcement before it can give leases
      if step > announced then return { 'wait', 'announce' } end
      return wait_for('groups')
    end
    if #ready == 0 and need == n then return { 'exhausted' } end
    need = #ready
  end
  if need > 0 and must_wait(ready, need) then
    if on_straggler == 'wait' then return wait_for('stragglers') end
    give_up_stragglers()
    ready = floors(READY, 0, need - 1)
  end
  pin(ready, need)
  return deliver()
end)

-- drop(incarnation, owner, server, step, group...) -> how many were dropped
-- Drops groups of the step's batch from which the learner cannot learn. The next take of this step fills their places.
-- Touches: all keys of a group (see settle), batch:*, dropped, given_up.
owner_verb('drop', { 'allow-oom' }, function()
  local n = 0
  for a = 5, #ARGV do
    if field(ARGV[a], 'pin') == ARGV[4] then
      settle_dropped(ARGV[a])
      n = n + 1
    end
  end
  if n > 0 then give_up_reproducing(tonumber(ARGV[4])) end
  count('dropped', n)
  count('uninformative', n)
  return n
end)

-- reject(incarnation, owner, server, step, group, round, member, reason, first bytes, 'prompt' | 'damaged' | 'sample')
--   -> 1, or 0 if the group is not pinned to this step in this round.
-- 'sample': the payload cannot be trained; the sample is generated anew, and its worker is blamed. 'damaged': the
-- payload is missing or damaged; the sample is generated anew. 'prompt': the prompt is damaged; the learner feeds it
-- again, and the whole group is generated anew. The first bytes go to the dead-letter stream.
-- Touches: meta, all keys of a group (see redo, requeue), prompt:*, lost, dead, strikes, quarantined, refused.
owner_verb('reject', { 'allow-oom' }, function()
  local g = ARGV[5]
  if field(g, 'pin') ~= ARGV[4] or field(g, 'round') ~= ARGV[6] then return 0 end
  local _, _, i = parse(ARGV[7])
  local by = i and field(g, 'by:' .. i)
  if ARGV[10] == 'prompt' then
    call('UNLINK', PROMPT .. g)
    requeue(g)
  elseif field(g, 'trimmed') == '1' then -- its trimmed samples are in no queue, so the group could not become whole
    requeue(g)
  else
    redo(g, i)
  end
  if i and ARGV[10] ~= 'prompt' then call('SADD', REFUSED, g .. ':' .. i) end
  give_up_reproducing(tonumber(ARGV[4]))
  local blamed = ARGV[10] == 'sample' and by or nil
  to_dead_letters(ARGV[7], name_of(by), ARGV[8], ARGV[9], blamed)
  strike(blamed)
  return 1
end)

-- commit(incarnation, owner, server, step, watermark, group...) -> {groups settled by this call, blobs to be freed}
-- Settles the batches pinned to steps below `step`, and the groups named: a durable checkpoint contains them. The
-- learner never feeds groups below the watermark again, so their names are forgotten.
-- Touches: all keys of a group (see settle), pinned, batch:*, settled, dropped.
owner_verb('commit', { 'allow-oom' }, function()
  local n = commit_below(ARGV[4])
  for a = 6, #ARGV do n = n + settle_trained(ARGV[a]) end
  raise_watermark(ARGV[5])
  return { n, call('LLEN', P .. 'garbage') }
end)
