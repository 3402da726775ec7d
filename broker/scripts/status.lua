-- What displays and clients read of a run.

-- peek() -> {state, offered incarnation, offered step, announced incarnation, announced step, group}, nil where not
-- set. `group` changes whenever the broadcast group is stored.
-- Workers call it all the time, so it goes without the beginning of other calls, which costs more than this one.
-- Reads: meta.
register('peek', { 'no-writes', 'allow-oom' }, function()
  return redis.call('HMGET', P .. 'meta', 'state', 'offered_incarnation', 'offered_step', 'announced_incarnation',
    'announced_step', 'group')
end)

-- server() -> id of the server's process
verb('server', { 'no-writes', 'allow-oom' }, function()
  return server_id()
end)

-- usage() -> {seconds since the run was last used, meta, {newest StepMetrics frame}, workers alive}
-- Reads: meta, steps, workers, worker:*.
verb('usage', { 'no-writes', 'allow-oom' }, function()
  local idle = call('OBJECT', 'IDLETIME', META) -- first: the reads below set it to 0
  return { idle or 0, call('HGETALL', META), call('LRANGE', P .. 'steps', -1, -1), #alive_workers() / 2 }
end)

-- progress() -> {seconds by this server's clock, meta, newest step with a batch | '', groups of that batch,
--   is a learner alive, floor of the youngest group that the next step would train | '',
--   {group, size, done, floor | '', {sample, its holder | '', held since | '', is leased}...}...}
-- Looks at the oldest unfinished groups, and at the first of their missing samples only: a display calls it often.
-- Reads: meta, pinned, batch:*, ready, open, retry, leases, group:*, holder.
verb('progress', { 'no-writes', 'allow-oom' }, function()
  local MOST_GROUPS, MOST_SAMPLES, MOST_RETRIES = 4, 16, 64
  local pinned = call('ZRANGE', P .. 'pinned', -1, -1)[1]

  -- Returns the groups that were begun, those of the oldest weights first, then those that wait for their first lease.
  local function unfinished()
    local names, seen = {}, {}
    local function add(g)
      if #names < MOST_GROUPS and not seen[g] then seen[g], names[#names + 1] = true, g end
    end
    for _, g in ipairs(call('ZRANGE', OPEN, 0, MOST_GROUPS - 1)) do add(g) end
    for _, m in ipairs(call('ZRANGE', RETRY, 0, MOST_RETRIES - 1)) do add((parse(m))) end
    return names
  end

  -- Returns {sample, holder, since, is leased}; the holder without its session, which is secret.
  local function missing(m, i, by, since)
    return { i, name_of(by or ''), since and string.format('%.3f', since) or '', call('ZSCORE', LEASES, m) and 1 or 0 }
  end

  local function described(g)
    local had = call('HMGET', group_key(g), 'size', 'done', 'floor', 'round')
    local size = tonumber(had[1] or '') or 0
    local found = { g, size, tonumber(had[2] or '') or 0, had[3] or '' }
    if size == 0 then return found end
    local by, since, tokens = by_sample(g, 'by', size), by_sample(g, 'since', size), by_sample(g, 'token', size)
    for a, payload in ipairs(by_sample(g, 'payload', size)) do
      if not payload and #found < 4 + MOST_SAMPLES then
        found[#found + 1] = missing(member(g, had[4], a - 1), a - 1, by[a], last_progress(tokens[a], since[a]))
      end
    end
    return found
  end

  local per_step = tonumber(call('HMGET', META, 'groups_per_step')[1] or '') or 1
  local youngest = call('ZRANGE', READY, per_step - 1, per_step - 1, 'WITHSCORES')[2]
  local reply = { string.format('%.3f', now()), call('HGETALL', META), pinned or '',
    pinned and call('LLEN', P .. 'batch:' .. pinned) or 0, call('GET', PUBLIC .. 'holder') and 1 or 0, youngest or '' }
  for _, g in ipairs(unfinished()) do reply[#reply + 1] = described(g) end
  return reply
end)

-- snapshot() -> {meta, tally, {pool, retry, leases, ready, pinned groups}, {StepMetrics frame...}, {worker, frame...},
--   {worker that is quarantined...}, {{tid, worker, reason} of dead letters, newest first...},
--   {samples refused in the last minute by a worker's fault, how many workers these came from},
--   {pool, frame, workers wanted...}, {{step of weights, groups generating, ready, dropped, samples ready, tokens
--   ready} newest first...},
--   {worker, ms that its session lasts, ms until it is not alive any more...},
--   {age of the oldest ready group | '', their mean age | '', age of the oldest lease | '', age of the next sample to
--   be leased | ''},
--   {{scorer, frame...}, {scorer's name, requests not answered, leased, age of the oldest, answered, failed, expired,
--   bytes}...}}
-- Ages are seconds as text. A look holds up all other clients, so it is bounded: of many leases the first 1000 are
-- looked at, and of more than 512 ready groups every second, third ... one, which then stands for so many; their counts
-- by step and their ages are estimates then.
-- Reads: meta, tally, pool, retry, leases, open, ready, given_up, pinned, batch:*, steps, workers,
--   worker:*, session:*, quarantined, dead, pools, pool:*, wanted, scoring:*.
verb('snapshot', { 'no-writes', 'allow-oom' }, function()
  local MOST_LEASES, MOST_READY = 1000, 512
  local sizes, pinned = {}, 0
  for i, queue in ipairs({ 'pool', 'retry', 'leases', 'ready' }) do sizes[i] = call('ZCARD', P .. queue) end
  for _, step in ipairs(call('ZRANGE', P .. 'pinned', 0, -1)) do
    pinned = pinned + call('LLEN', P .. 'batch:' .. step)
  end
  sizes[5] = pinned

  -- Returns nothing to a worker's user: it may not read dead letters, whose reasons quote samples of other workers.
  local function letters_since(start, most)
    local entries, letters = redis.pcall('XREVRANGE', P .. 'dead', '+', start, 'COUNT', most), {}
    if entries.err then return letters end
    for n, entry in ipairs(entries) do
      local flat, found = entry[2], {}
      for a = 1, #flat, 2 do found[flat[a]] = flat[a + 1] end
      letters[n] = found
    end
    return letters
  end

  local function dead_letters()
    local letters = letters_since('-', 8)
    for n, found in ipairs(letters) do letters[n] = { found.tid, found.worker, found.reason } end
    return letters
  end

  local function refused_lately()
    local samples, workers, seen = 0, 0, { [''] = true }
    for _, found in ipairs(letters_since(string.format('%.0f', 1000 * (now() - 60)), 1000)) do
      local blamed = found.blamed or ''
      if blamed ~= '' then samples = samples + 1 end
      if not seen[blamed] then seen[blamed], workers = true, workers + 1 end
    end
    return { samples, workers }
  end

  -- Returns the counts of groups by the step of the oldest weights that sampled them, and what `queue` says of ready
  -- samples, for the newest versions; a version samples before it is announced, so the first one may be the next.
  local function by_version(waiting)
    local found, newest = {}, tonumber(call('HMGET', META, 'announced_step')[1] or '')
    for step = (newest or -1) + 1, math.max(0, (newest or 0) + 2 - SHOWN_VERSIONS), -1 do
      local counts, total = { step }, 0
      for n, queue in ipairs({ OPEN, READY, P .. 'given_up' }) do
        counts[n + 1] = call('ZCOUNT', queue, step, step)
        total = total + counts[n + 1]
      end
      counts[5], counts[6] = unpack(waiting[step] or { 0, 0 })
      total = total + counts[6]
      if total > 0 then found[#found + 1] = counts end
    end
    return found
  end

  local function since(g, name) return tonumber(call('HMGET', group_key(g), name)[1] or '') end

  -- Returns the largest and the mean age of these times, as text; '' for none.
  local function ages(times)
    local oldest, total, time = 0, 0, now()
    for _, at in ipairs(times) do
      oldest, total = math.max(oldest, time - at), total + math.max(0, time - at)
    end
    if #times == 0 then return '', '' end
    return string.format('%.3f', oldest), string.format('%.3f', total / #times)
  end

  -- Returns {step = {samples whose oldest token it sampled, tokens}} of all ready groups, and since when those that
  -- were looked at have waited. They lie evenly over the queue, which is sorted by step.
  local function queue()
    local waiting, ready, size = {}, {}, sizes[4]
    local every = math.max(1, math.ceil(size / MOST_READY))
    local all = every == 1 and call('ZRANGE', READY, 0, -1)
    for place = 0, size - 1, every do
      local stands_for = math.min(every, size - place)
      local g = all and all[place + 1] or call('ZRANGE', READY, place, place)[1]
      local at, by_step = fields(g, 'ready_at', 'by_step')
      ready[#ready + 1] = tonumber(at or '')
      for step, samples, tokens in string.gmatch(by_step or '', '(%d+):(%d+):(%d+)') do
        local had = waiting[tonumber(step)] or { 0, 0 }
        waiting[tonumber(step)] = { had[1] + stands_for * samples, had[2] + stands_for * tokens }
      end
    end
    return waiting, ready
  end

  local function queue_ages(ready)
    local leased, next_one = {}, {}
    for _, m in ipairs(call('ZRANGE', LEASES, 0, MOST_LEASES - 1)) do
      local g, _, i = parse(m)
      leased[#leased + 1] = last_progress(fields(g, 'token:' .. i, 'since:' .. i))
    end
    for _, m in ipairs(call('ZRANGE', RETRY, 0, 0)) do next_one[1] = since(parse(m), 'queued_at') end
    local oldest, mean = ages(ready)
    return { oldest, mean, (ages(leased)), (ages(next_one)) }
  end

  local waiting, ready = queue()
  local alive, lifetimes = alive_workers(), {}
  for a = 1, #alive, 2 do
    lifetimes[#lifetimes + 1] = alive[a]
    for _, key in ipairs({ 'session:', 'worker:' }) do
      lifetimes[#lifetimes + 1] = call('PTTL', P .. key .. alive[a])
    end
  end

  -- Names without sessions, which are secret.
  local quarantined = {}
  for n, holder in ipairs(call('SMEMBERS', P .. 'quarantined')) do quarantined[n] = name_of(holder) end

  return { call('HGETALL', META), call('HGETALL', P .. 'tally'), sizes, call('LRANGE', P .. 'steps', 0, -1),
    alive, quarantined, dead_letters(), refused_lately(), alive_pools(),
    by_version(waiting), lifetimes, queue_ages(ready), scoring_status() }
end)
