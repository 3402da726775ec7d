-- Leases of samples to workers.

-- lease(incarnation, step, count, ttl_s, nonce, holder, recipe | '', number of leases held, member of a copy held...)
--   -> {state, reason, 'incarnation.highest step', {'member token' in doubt...},
--       {member, token} or {member, token, oldest step, segment...}...}
-- Leases admitted samples that have no lease (expired, handed back, never begun), those due first, then newly admitted
-- groups, then copies of samples that others hold and do not get on with.
-- A sample whose lease has expired and that no other holder has taken is not leased to the one that had it: that one
-- may still be generating it, or may never have had the answer. So it is told which samples are in doubt, and releases
-- those that it does not hold.
-- `recipe` is a digest of the configuration that the worker obeys. One that obeys another than the run's gets no
-- leases: its samples would be drawn by other rules.
-- A process that uses the name of another worker is told apart by its session and not refused: otherwise a process that
-- takes a name first could keep the worker of that name from working.
-- Touches: meta, tally, pool, retry, leases, open, group:*, segments:*; reads session:*, refused, standing.
verb('lease', {}, function()
  local incarnation, step = whole(1, 'incarnation', 0, 2147483647), whole(2, 'step', 0, 2147483647)
  local wanted, nonce, holder = whole(3, 'count', 0, 1000000), text(5, 'nonce', 64), text(6, 'holder', 200)
  if not string.match(nonce, '^%x+$') then refuse('nonce') end
  local worker, session = string.match(holder, '^(%w[%w._-]*) (%w+)$')
  if not worker then refuse('holder') end
  local recipe, n_held = text(7, 'recipe', 64), whole(8, 'held', 0, 1000000)
  local names_of_caller = { [worker .. ' ' .. session] = true, [worker .. '? ' .. session] = true }
  if is_of_another(worker, session) then holder = worker .. '? ' .. session end
  local known = call('HMGET', META, 'state', 'on_over_bound', 'incarnation', 'announced_incarnation', 'announced_step',
    'max_lag', 'groups_per_step', 'max_leases_per_worker', 'admitted', 'dropped', 'payload_bytes', 'max_bytes',
    'archive_bytes', 'highest_step', 'lease_ttl_s', 'lease_hold_s', 'segment_s', 'waiting_since', 'recipe', 'ahead')
  local state, on_over_bound, obeyed = known[1] or 'absent', known[2], known[19]
  for a = 3, 18 do known[a] = tonumber(known[a] or '') end
  local newest_incarnation, announced_incarnation, announced, lag, groups_per_step = unpack(known, 3, 7)
  local ahead = tonumber(known[20] or '') or lag
  local doubts, copied = {}, {}
  local reply, given, time = { state, '', (newest_incarnation or 0) .. '.' .. (known[14] or 0), doubts }, 0, now()
  local deadline = string.format('%.6f', time + seconds(4, known[15] or 3600))
  for a = 9, #ARGV do copied[ARGV[a]] = true end

  local function refuse(reason) reply[2] = reason return reply end

  if state == 'finished' then return refuse('finished') end
  local copier = '? ' .. digest_of(holder)
  for _, name in ipairs({ holder, copier }) do
    if call('SISMEMBER', P .. 'quarantined', name) == 1 then return refuse('quarantined') end
    if call('ZSCORE', STANDING, name) then call('ZADD', STANDING, time, holder) end
  end
  if not announced or state == 'stopped' or incarnation > newest_incarnation then return refuse('paused') end
  if step > (known[14] or 0) + FORGOTTEN then return refuse('paused') end
  if recipe ~= '' and recipe ~= obeyed then return refuse('recipe') end
  -- A sample begun with weights of an abandoned branch, or too old for the next step, could not be trained.
  if step + lag < announced or (incarnation < announced_incarnation and step > announced)
    or is_abandoned(incarnation, step) then
    return refuse('stale weights')
  end
  local limit = known[8] or 0
  wanted = math.min(wanted, 1000) -- bounds the arguments of one command
  if limit > 0 then wanted = math.min(wanted, limit - n_held) end
  if wanted <= 0 then return refuse('worker limit') end

  local token_of = tokens_under(nonce_of_lease(nonce, incarnation))
  local step_text = string.format('%d', step)

  local function may(index) return math.floor(index / groups_per_step) <= step + lag end

  local function is_too_old(oldest) return announced - oldest > lag and on_over_bound ~= 'mask' end

  -- Returns the names of a sample's segments, after which the worker goes on, and their oldest step.
  local function segments_of(m, oldest)
    local names, by_lag = {}, {}
    for _, entry in ipairs(call('LRANGE', segments_key(m), 0, -1)) do
      local name, _, tokens, _, by_step = parse_segment(entry)
      names[#names + 1] = name
      count('resumed_tokens', tokens)
      for from, sampled in string.gmatch(by_step, '(%d+):(%d+)') do
        local lag_of = math.max(0, announced - from)
        by_lag[lag_of] = (by_lag[lag_of] or 0) + sampled
      end
    end
    for lag_of, sampled in pairs(by_lag) do tally('resumed_by_lag', lag_of, sampled) end
    return names, oldest
  end

  -- Returns the same, but frees segments that are too old to be trained, and returns none.
  local function usable_segments(g, m, i, oldest)
    if is_too_old(oldest) then discard_segments(g, m, i) return {} end
    return segments_of(m, oldest)
  end

  -- Leases samples of one group, except those that the caller itself may still be generating, which are in doubt. Adds
  -- members to `handed`, and deadlines and members to `leased` (as ZADD takes them).
  local function hand(g, samples, handed, leased)
    local names, set, revived, n, lowest, is_raised = { 'floor' }, {}, {}, 1, nil, false
    for _, i in ipairs(samples.numbers) do
      names[n + 1], names[n + 2], names[n + 3] = 'token:' .. i, 'step:' .. i, 'oldest:' .. i
      names[n + 4], names[n + 5] = 'since:' .. i, 'by:' .. i
      n = n + 5
    end
    local had = call('HMGET', group_key(g), unpack(names))
    n = 0
    for a, m in ipairs(samples) do
      local token, had_from, oldest, since, by = unpack(had, 5 * a - 3, 5 * a + 1)
      local segments
      if token and names_of_caller[by] then
        doubts[#doubts + 1] = m .. ' ' .. token
      elseif given < wanted and not copied[m] then
        if oldest then segments, oldest = usable_segments(g, m, samples.numbers[a], tonumber(oldest)) end
        local from = math.min(step, oldest or step)
        given = given + 1
        token = token_of(m)
        if since then revived[#revived + 1] = 'since:' .. samples.numbers[a] end
        set[n + 1], set[n + 2], set[n + 3], set[n + 4] = names[5 * a - 3], token, names[5 * a - 2], from
        set[n + 5], set[n + 6] = names[5 * a + 1], holder
        n = n + 6
        lowest = math.min(lowest or from, from)
        is_raised = is_raised or (had_from and tonumber(had_from) < from)
        reply[given + 4] = segments and { m, token, oldest, unpack(segments) } or { m, token }
        local at = #handed
        handed[at + 1], leased[2 * at + 1], leased[2 * at + 2] = m, deadline, m
      end
    end
    if not lowest then return end
    local floor = tonumber(had[1] or '')
    local is_lower = not floor or lowest < floor
    if is_lower then set[n + 1], set[n + 2] = 'floor', lowest end
    call('HSET', group_key(g), unpack(set))
    if #revived > 0 then call('HDEL', group_key(g), unpack(revived)) end
    if is_lower then call('ZADD', OPEN, lowest, g) elseif is_raised then refloor(g) end
  end

  -- Offers samples with expired leases to all workers. The holder keeps its token, and the sample, until another worker
  -- leases it.
  local function collect_expired()
    for _, m in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', time, 'LIMIT', 0, 1000)) do
      call('ZREM', LEASES, m)
      call('ZADD', RETRY, field((parse(m)), 'index'), m)
      count('expired_leases')
    end
  end

  -- Returns the group whose samples stand at place `a` of the queue, those samples, and the place after them.
  local function next_group(queue, a)
    local g, samples, n = nil, { numbers = {} }, 0
    while queue[a] and n < 1000 do
      local other, _, i = parse(queue[a])
      if other ~= (g or other) then break end
      n, g = n + 1, other
      samples[n], samples.numbers[n] = queue[a], i
      a = a + 2
    end
    return g, samples, a
  end

  local function hand_retries()
    local queue = call('ZRANGE', RETRY, 0, wanted - given - 1 + n_held, 'WITHSCORES')
    local handed, leased, reason = {}, {}, nil
    local a = 1
    while queue[a] and given < wanted do
      if not may(tonumber(queue[a + 1])) then reason = 'stale weights' break end
      local g, samples, next_a = next_group(queue, a)
      hand(g, samples, handed, leased)
      a = next_a
    end
    if #handed > 0 then
      call('ZADD', LEASES, unpack(leased))
      call('ZREM', RETRY, unpack(handed))
    end
    return reason
  end

  local index, stored_bytes = (known[9] or 0) - (known[10] or 0), (known[11] or 0) + (known[13] or 0)
  local max_bytes = known[12]

  -- Returns nil, or the reason why no new group may be admitted now.
  local function refusal()
    if index >= (announced + 1 + ahead) * groups_per_step then return 'capacity' end
    if not may(index) then return 'stale weights' end
    if stored_bytes >= max_bytes then return 'bytes' end
  end

  -- Leases samples of a group that is admitted now, of which the server knows no lease and no segment yet. Those beyond
  -- the caller's wish wait for the next one.
  local function hand_new(g, round, size)
    local set, leased, waiting = { 'state', 'open', 'index', index, 'queued_at', time }, {}, {}
    local n, w, before = 6, 0, given
    for a, m in ipairs(members(g, round, size)) do
      if given < wanted and not copied[m] then
        local i, token = digits(a - 1), token_of(m)
        given = given + 1
        set[n + 1], set[n + 2], set[n + 3], set[n + 4] = 'token:' .. i, token, 'step:' .. i, step_text
        set[n + 5], set[n + 6] = 'by:' .. i, holder
        n = n + 6
        reply[given + 4] = { m, token }
        local at = 2 * (given - before)
        leased[at - 1], leased[at] = deadline, m
      else
        waiting[w + 1], waiting[w + 2] = index, m
        w = w + 2
      end
    end
    if given > before then
      set[n + 1], set[n + 2] = 'floor', step_text
      call('ZADD', LEASES, unpack(leased))
      call('ZADD', OPEN, step_text, g)
    end
    call('HSET', group_key(g), unpack(set))
    if w > 0 then call('ZADD', RETRY, unpack(waiting)) end
  end

  local function admit()
    local reason = refusal()
    if reason then return call('ZCARD', P .. 'pool') == 0 and 'no prompts' or reason end
    local g = call('ZPOPMIN', P .. 'pool')[1]
    if not g then return 'no prompts' end
    local length, round, size = fields(g, 'length', 'round', 'size')
    count('admitted')
    tally('dispatched_by_prompt_length', length)
    hand_new(g, round, size)
    index = index + 1
  end

  local function hand_all()
    local reason = hand_retries()
    while not reason and given < wanted do reason = admit() end
    if reason then refuse(reason) end
  end

  -- Gives copies of those samples of a group that are leased to others and not done, and for which `is_due(i, since)`
  -- holds; `since` is when a sample was leased, or got its last tokens.
  local function copy_samples(g, is_due)
    local round, state, size, index = fields(g, 'round', 'state', 'size', 'index')
    if state ~= 'open' or not may(tonumber(index)) then return end
    local tokens, payloads = by_sample(g, 'token', size), by_sample(g, 'payload', size)
    local since, oldest = by_sample(g, 'since', size), by_sample(g, 'oldest', size)
    local by = by_sample(g, 'by', size)
    for a = 1, size do
      local m, had = member(g, round, a - 1), tonumber(oldest[a] or '')
      local is_under_way = tokens[a] and not payloads[a]
      local is_mine = copied[m] or names_of_caller[by[a] or '']
      local at = last_progress(tokens[a], since[a]) or time
      if given < wanted and is_under_way and not is_mine and is_due(a - 1, at) then
        given = given + 1
        copied[m] = true
        if had and is_too_old(had) then had = nil end
        local token = tokens_under(nonce_of_copy(incarnation, math.min(step, had or step), holder))(m)
        reply[given + 4] = had and { m, token, had, unpack(segments_of(m, had)) } or { m, token }
      end
    end
  end

  -- Gives copies to a worker for which nothing else is left; the first sample that is handed in wins. Else a program
  -- that leases samples and does nothing with them could hold up the learner, however often they change hands. Honest
  -- workers get on, so they meet a copy only if their engine or their reward function hangs while the learner starves.
  local function hand_copies()
    local last_ttl, hold, segment, waiting_since = known[15] or 3600, known[16] or 86400, known[17] or 0, known[18]
    local stall = segment > 0 and math.max(2 * last_ttl, 3 * segment) or hold
    if waiting_since and time - waiting_since >= last_ttl then
      for _, g in ipairs(call('ZRANGE', OPEN, 0, math.min(groups_per_step, 1000) - 1)) do
        if given >= wanted then return end
        local queued_at = tonumber(field(g, 'queued_at') or time)
        copy_samples(g, function(_, since) return time - since >= stall or time - queued_at >= hold end)
      end
    end
    if call('SCARD', REFUSED) > 0 and has_standing(holder) then
      for _, sample in ipairs(call('SRANDMEMBER', REFUSED, 100)) do
        local g, number = string.match(sample, '^(.+):(%d+)$')
        copy_samples(g, function(i) return i == tonumber(number) end)
      end
    end
  end

  collect_expired()
  hand_all()
  local exclusive = given
  if given < wanted then hand_copies() end
  if given > exclusive then count('copied_leases', given - exclusive) end
  if given > 0 then tally('dispatched_by_lag', math.max(0, announced - step), given) end
  return reply
end)

-- prompts({member, token}...) -> {prompt frame, or nil where the caller has no lease or the prompt is lost...}
-- Reads: group:*, prompt:*.
verb('prompts', { 'no-writes', 'allow-oom' }, function()
  local frames = {}
  for a = 1, #ARGV, 2 do
    local g, round, i = sample(a)
    local had = call('HMGET', group_key(g), 'round', 'token:' .. i)
    local is_leased = had[1] == round and (had[2] == ARGV[a + 1] or copy_of(ARGV[a], ARGV[a + 1]))
    frames[(a + 1) / 2] = is_leased and call('GET', PROMPT .. g) or false
  end
  return frames
end)

-- release({member, token}...) -> how many leases were given back. The samples keep their segments.
-- Touches: retry, leases, open, group:*.
verb('release', { 'allow-oom' }, function()
  local n = 0
  for a = 1, #ARGV, 2 do
    local g, round, i = sample(a)
    local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'payload:' .. i, 'state')
    if had[1] == round and had[2] == ARGV[a + 1] and not had[3] and had[4] == 'open' then
      hand_back(ARGV[a])
      n = n + 1
    end
  end
  return n
end)
