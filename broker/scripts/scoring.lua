-- Scoring work: workers ask for scores of token sequences, and scorer processes lease the requests and answer. Requests
-- of scorer NAME have a zset `scoring:queue:NAME` (by the time from which a scorer may have them), a zset
-- `scoring:asked:NAME` (by the time at which they are forgotten) and a hash `scoring:request:NAME:ID` each (see
-- broker/keys.py). The bytes of each asker are counted, as workers are not trusted. All these keys begin with
-- `scoring:`, as a scorer's user may write no others.
local SCORING = P .. 'scoring:'
local SCORER_NAMES, SCORERS = SCORING .. 'names', SCORING .. 'scorers'
local MOST_TRIES, A_DAY, LONGEST_ASKED_S = 5, 86400, 60
-- Of one request; of all requests of one scorer's name; of one asker's among these; what a request costs beside its
-- tokens.
local MOST_REQUEST_BYTES, MOST_SCORING_BYTES, MOST_ASKER_BYTES, REQUEST_OVERHEAD = 2 ^ 23, 2 ^ 26, 2 ^ 25, 512

local function scoring_queue(name) return SCORING .. 'queue:' .. name end
local function scoring_asked(name) return SCORING .. 'asked:' .. name end
local function scoring_askers(name) return SCORING .. 'askers:' .. name end
local function scoring_of(name, by) return SCORING .. 'of:' .. name .. ':' .. by end
local function scoring_counts(name) return SCORING .. 'counts:' .. name end
local function scoring_request(name, id) return SCORING .. 'request:' .. name .. ':' .. id end

-- Refuses users that are no scorer: only users of scorers and learners may read this key, which nobody stores.
local function fence_scorer() call('EXISTS', PUBLIC .. 'scoring') end

-- Returns ARGV[a], the name of a scorer that requests are for.
local function scorer_name(a)
  if not string.match(text(a, 'scorer', 100), '^%w[%w._-]*$') then refuse('scorer') end
  return ARGV[a]
end

-- Returns ARGV[a], the random name of a request, or the token of its lease.
local function scoring_id(a)
  if not string.match(text(a, 'request', 64), '^%w+$') then refuse('request') end
  return ARGV[a]
end

local function count_scoring(name, what, n) call('HINCRBY', scoring_counts(name), what, n or 1) end

-- Adds to the bytes that the requests of an asker take.
local function count_bytes(name, by, n)
  count_scoring(name, 'bytes', n)
  if call('HINCRBY', scoring_askers(name), by, n) <= 0 then call('HDEL', scoring_askers(name), by) end
end

-- Stores the outcome of a request in place of its frame.
local function end_request(name, id, what, value)
  local key, bytes = scoring_request(name, id), #value + REQUEST_OVERHEAD
  local had, by = unpack(call('HMGET', key, 'bytes', 'by'))
  count_bytes(name, by or '', bytes - (had or 0))
  count_scoring(name, what)
  call('HSET', key, what, value, 'bytes', bytes)
  call('HDEL', key, 'frame')
  call('ZREM', scoring_queue(name), id)
end

local function forget_request(name, id)
  local key = scoring_request(name, id)
  local bytes, by = unpack(call('HMGET', key, 'bytes', 'by'))
  if bytes then
    count_bytes(name, by, -bytes)
    call('ZREM', scoring_of(name, by), id)
  end
  call('UNLINK', key)
  call('ZREM', scoring_queue(name), id)
  call('ZREM', scoring_asked(name), id)
end

-- Forgets requests whose askers have not asked for so long that they are gone.
local function forget_abandoned(name, time)
  for _, id in ipairs(call('ZRANGEBYSCORE', scoring_asked(name), '-inf', time, 'LIMIT', 0, 100)) do
    forget_request(name, id)
  end
end

-- Returns who asks: ARGV[a], a living worker whose session ARGV[b] is; all others together are '?', and the learner,
-- whose user alone may read `owner`, is ''. Workers in quarantine are refused.
local function asker(a, b)
  if ARGV[a] == '' then
    call('GET', PUBLIC .. 'owner')
    return ''
  end
  local worker, session = worker_name(a), text(b, 'session', 64)
  if call('SISMEMBER', P .. 'quarantined', worker .. ' ' .. session) == 1 then refuse('worker: it is quarantined') end
  return call('GET', P .. 'session:' .. worker) == session and worker or '?'
end

-- Makes room for a request of an asker, if other askers have more bytes than that one would have. The newest requests
-- go first, as scorers may be at work on older ones. Returns whether there is room.
local function has_scoring_room(name, by, bytes)
  local would_have = (call('HGET', scoring_askers(name), by) or 0) + bytes
  if would_have > MOST_ASKER_BYTES then return false end
  while (call('HGET', scoring_counts(name), 'bytes') or 0) + bytes > MOST_SCORING_BYTES do
    local most, other, flat = would_have, nil, call('HGETALL', scoring_askers(name))
    for n = 1, #flat, 2 do
      if flat[n] ~= by and tonumber(flat[n + 1]) > most then other, most = flat[n], tonumber(flat[n + 1]) end
    end
    local id = other and call('ZRANGE', scoring_of(name, other), -1, -1)[1]
    if not id then return false end
    forget_request(name, id)
    call('ZREM', scoring_of(name, other), id)
  end
  return true
end

-- Lets another scorer have a request, or ends it as failed once so many had it in vain.
local function queue_again(name, id, reason)
  local key = scoring_request(name, id)
  local tries, since = unpack(call('HMGET', key, 'tries', 'since'))
  if (tonumber(tries or '') or 0) >= MOST_TRIES then
    end_request(name, id, 'failed', reason)
  else
    call('HDEL', key, 'token')
    call('ZADD', scoring_queue(name), since, id)
  end
end

-- Returns true if ARGV[a], ARGV[a + 1] are a request that is not answered, and the token of its newest lease.
local function holds_request(name, a)
  local token = call('HGET', scoring_request(name, scoring_id(a)), 'token')
  return token == scoring_id(a + 1) and call('ZSCORE', scoring_queue(name), ARGV[a]) and true or false
end

-- Returns {{scorer, frame...}, {name, requests not answered, leased of these, age of the oldest, answered, failed,
-- expired leases, bytes}...}.
local function scoring_status()
  local alive, reply, time = {}, {}, now()
  local processes, names = call('SMEMBERS', SCORERS), call('SMEMBERS', SCORER_NAMES)
  table.sort(processes)
  table.sort(names)
  for _, process in ipairs(processes) do
    local frame = call('GET', SCORING .. 'scorer:' .. process)
    if frame then
      alive[#alive + 1] = process
      alive[#alive + 1] = frame
    end
  end
  reply[1] = alive
  for _, name in ipairs(names) do
    local queue, oldest = scoring_queue(name), 0
    for _, id in ipairs(call('ZRANGE', queue, 0, 0)) do
      oldest = time - (tonumber(call('HMGET', scoring_request(name, id), 'since')[1] or '') or time)
    end
    local had = call('HMGET', scoring_counts(name), 'answered', 'failed', 'expired', 'bytes')
    local entry = { name, call('ZCARD', queue), call('ZCOUNT', queue, time, '+inf'), string.format('%.3f', oldest) }
    for n = 1, 4 do entry[4 + n] = tonumber(had[n] or '') or 0 end
    reply[#reply + 1] = entry
  end
  return reply
end

-- score_ask(scorer's name, worker | '', session, ttl_s, hold_s, {request, frame}...)
--   -> {1 where the request is held now, or 0 where there is no room for it...}
-- Asks scorers of the run for the scores of token sequences. A request is forgotten once its asker has not collected
-- for `ttl_s`, a minute at most. A scorer keeps it for `hold_s` at most; then another one gets it. Where there is no
-- room, the newest request of the asker with most bytes makes room for one with fewer. Idempotent.
-- Touches: scoring:*; reads meta, owner, session:*, quarantined.
verb('score_ask', {}, function()
  local name, time, by = scorer_name(1), now(), asker(2, 3)
  local ttl, hold = seconds(4, LONGEST_ASKED_S), seconds(5, A_DAY)
  for a = 6, #ARGV, 2 do
    scoring_id(a)
    text(a + 1, 'frame', MOST_REQUEST_BYTES)
  end
  if not string.find(' ' .. (meta('scorers') or '') .. ' ', ' ' .. name .. ' ', 1, true) then
    refuse('scorer: the run has no ' .. name)
  end
  forget_abandoned(name, time)
  call('SADD', SCORER_NAMES, name)
  local held = {}
  for a = 6, #ARGV, 2 do
    local id, frame = ARGV[a], ARGV[a + 1]
    local key, bytes = scoring_request(name, id), #frame + REQUEST_OVERHEAD
    local is_held = call('EXISTS', key) == 1
    if not is_held and has_scoring_room(name, by, bytes) then
      call('HSET', key, 'frame', frame, 'bytes', bytes, 'since', time, 'hold', hold, 'tries', 0, 'by', by)
      call('EXPIRE', key, A_DAY)
      call('ZADD', scoring_queue(name), time, id)
      call('ZADD', scoring_of(name, by), time, id)
      call('EXPIRE', scoring_of(name, by), A_DAY)
      count_bytes(name, by, bytes)
      is_held = true
    end
    if is_held then call('ZADD', scoring_asked(name), time + ttl, id) end
    held[#held + 1] = is_held and 1 or 0
  end
  for _, key in ipairs({ SCORER_NAMES, scoring_queue(name), scoring_asked(name), scoring_counts(name),
    scoring_askers(name) }) do
    call('EXPIRE', key, A_DAY)
  end
  return held
end)

-- score_collect(scorer's name, ttl_s, n, request...) -> {{'waiting'}, {'unknown'}, {'answered', float32 values} or
-- {'failed', reason}...} of all requests but the first n
-- Forgets the first n requests, whose asker needs them no more, and tells how far the others are. Their askers go on
-- waiting for at least `ttl_s`. A server that has lost a request does not know it: it is to be asked again.
-- Touches: scoring:*.
verb('score_collect', { 'allow-oom' }, function()
  local name, time, ttl, forgotten = scorer_name(1), now(), seconds(2, 3600), whole(3, 'number', 0, 100000)
  for a = 4, #ARGV do scoring_id(a) end
  local reply = {}
  for a = 4, #ARGV do
    if a < 4 + forgotten then
      forget_request(name, ARGV[a])
    else
      local found = call('HMGET', scoring_request(name, ARGV[a]), 'since', 'answered', 'failed')
      if found[1] then call('ZADD', scoring_asked(name), time + ttl, ARGV[a]) end
      reply[#reply + 1] = not found[1] and { 'unknown' } or found[2] and { 'answered', found[2] }
        or found[3] and { 'failed', found[3] } or { 'waiting' }
    end
  end
  return reply
end)

-- score_lease(scorer's name, ttl_s, nonce, most requests, most bytes, recipe | '', {request, token}...)
--   -> {'recipe' | '', {request that the caller has lost...}, {request, frame}...}
-- Renews the leases that a scorer has, but none for longer than its request's `hold`, and leases it more requests, the
-- longest asked first, with `nonce` as their token. A lease that is not renewed expires, and another scorer gets the
-- request; one that so many scorers had in vain has failed.
-- `recipe` is a digest of the configuration that the scorer obeys. One that obeys another than the run's gets no more
-- requests, and the reply says so: its model may be another one.
-- Touches: scoring:*; reads scoring, meta.
verb('score_lease', { 'allow-oom' }, function()
  fence_scorer()
  local name, time, ttl = scorer_name(1), now(), seconds(2, 3600)
  local nonce, most, most_bytes = scoring_id(3), whole(4, 'requests', 0, 10000), whole(5, 'bytes', 0, 2 ^ 40)
  local recipe = text(6, 'recipe', 64)
  for a = 7, #ARGV, 2 do holds_request(name, a) end -- checks all arguments before anything is written
  local queue, lost = scoring_queue(name), {}
  for a = 7, #ARGV, 2 do
    local since, hold = unpack(call('HMGET', scoring_request(name, ARGV[a]), 'leased', 'hold'))
    if holds_request(name, a) and time < since + hold then
      call('ZADD', queue, math.min(time + ttl, since + hold), ARGV[a])
    else
      lost[#lost + 1] = ARGV[a]
    end
  end

  forget_abandoned(name, time)
  if recipe ~= '' and recipe ~= meta('recipe') then return { 'recipe', lost } end
  local reply, bytes = { '', lost }, 0
  for _, id in ipairs(call('ZRANGEBYSCORE', queue, '-inf', time, 'LIMIT', 0, most)) do
    local key = scoring_request(name, id)
    local frame, tries, had_token, reason = unpack(call('HMGET', key, 'frame', 'tries', 'token', 'reason'))
    if had_token then count_scoring(name, 'expired') end
    if not frame then
      call('ZREM', queue, id)
    elseif tonumber(tries) >= MOST_TRIES then
      reason = reason or MOST_TRIES .. ' scorers had it and none has answered within its deadline_s'
      end_request(name, id, 'failed', reason)
    elseif bytes == 0 or bytes + #frame <= most_bytes then
      call('HSET', key, 'token', nonce, 'leased', time)
      call('HINCRBY', key, 'tries', 1)
      call('ZADD', queue, time + ttl, id)
      bytes = bytes + #frame
      reply[#reply + 1] = { id, frame }
    else
      break
    end
  end
  return reply
end)

-- score_answer(scorer's name, {request, token, float32 values}...) -> {outcome...}
-- Hands scores in. The first answer under a request's newest lease counts. Touches: scoring:*; reads scoring.
verb('score_answer', { 'allow-oom' }, function()
  fence_scorer()
  local name, outcomes = scorer_name(1), {}
  for a = 2, #ARGV, 3 do
    scoring_id(a)
    scoring_id(a + 1)
    text(a + 2, 'values', MOST_REQUEST_BYTES)
  end
  for a = 2, #ARGV, 3 do
    local id = ARGV[a]
    local token, answered, failed = unpack(call('HMGET', scoring_request(name, id), 'token', 'answered', 'failed'))
    local outcome = token == ARGV[a + 1] and not failed and (answered and 'duplicate' or 'accepted') or 'fenced'
    if outcome == 'accepted' then end_request(name, id, 'answered', ARGV[a + 2]) end
    outcomes[#outcomes + 1] = outcome
  end
  return outcomes
end)

-- score_release(scorer's name, reason, {request, token}...) -> how many leases were given back
-- Gives leases back at once, for other scorers. An empty reason: the scorer leaves, and has not tried. Else it cannot
-- score the request; so many scorers that cannot end it. Touches: scoring:*; reads scoring.
verb('score_release', { 'allow-oom' }, function()
  fence_scorer()
  local name, reason, n = scorer_name(1), quoted(2, 2000), 0
  for a = 3, #ARGV, 2 do holds_request(name, a) end
  for a = 3, #ARGV, 2 do
    if holds_request(name, a) then
      local key = scoring_request(name, ARGV[a])
      if reason == '' then call('HINCRBY', key, 'tries', -1) else call('HSET', key, 'reason', reason) end
      queue_again(name, ARGV[a], reason)
      n = n + 1
    end
  end
  return n
end)

-- score_report_death(session) -> how many requests were queued again.
-- The scorer process with this session has ended without giving them back; its supervisor, which made the session, says
-- so. Nobody else knows it, so this verb is refused to no user. The tokens of that process's leases begin with a digest
-- of the session. Its leases count as expired, and a request that many processes had in vain ends as failed.
-- Looks at 10000 requests of a scorer at most: the others' leases expire. Touches: scoring:*.
verb('score_report_death', { 'allow-oom' }, function()
  local session, MOST, n = text(1, 'session', 64), 10000, 0
  if #session < 32 or not string.match(session, '^%x+$') then refuse('session') end
  local mark = string.sub(redis.sha1hex(session), 1, 16)
  for _, name in ipairs(call('SMEMBERS', SCORER_NAMES)) do
    for _, id in ipairs(call('ZRANGEBYSCORE', scoring_queue(name), '-inf', '+inf', 'LIMIT', 0, MOST)) do
      local token = call('HGET', scoring_request(name, id), 'token')
      if token and string.sub(token, 1, #mark) == mark then
        count_scoring(name, 'expired')
        queue_again(name, id, MOST_TRIES .. ' scorers had it, and the last of them died')
        n = n + 1
      end
    end
  end
  return n
end)

-- scorer(process, ttl in ms, frame | '') -> OK
-- Stores a scorer process's report of itself for `ttl`, two minutes at most; '': the process leaves.
-- Touches: scoring:*; reads scoring.
verb('scorer', { 'allow-oom' }, function()
  fence_scorer()
  local process, ttl_ms, MOST = scorer_name(1), math.min(whole(2, 'ttl', 1, 1000000000), 120000), 1024
  local frame, key = text(3, 'frame', 16384), SCORING .. 'scorer:' .. process
  if frame == '' then
    call('UNLINK', key)
    call('SREM', SCORERS, process)
    return redis.status_reply('OK')
  end
  if call('SISMEMBER', SCORERS, process) == 0 and call('SCARD', SCORERS) >= MOST then
    for _, name in ipairs(call('SMEMBERS', SCORERS)) do
      if call('EXISTS', SCORING .. 'scorer:' .. name) == 0 then call('SREM', SCORERS, name) end
    end
    if call('SCARD', SCORERS) >= MOST then refuse('scorer: ' .. MOST .. ' are alive') end
  end
  call('SET', key, frame, 'PX', ttl_ms)
  call('SADD', SCORERS, process)
  call('EXPIRE', SCORERS, A_DAY)
  return redis.status_reply('OK')
end)
