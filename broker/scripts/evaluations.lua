-- Evaluations: workers that hold exactly one version of the weights sample held-out prompts with it. These samples are
-- in no queue of the training's samples and in none of its counters. Version V has the hash `evaluation:V` and the
-- zsets `evaluating:V` and `begun:V` (see broker/keys.py); its prompts lie under `prompt:evaluation:V:N`.
local EVALUATIONS = P .. 'evaluations'

local function evaluation_key(version) return P .. 'evaluation:' .. version end
local function evaluating_key(version) return P .. 'evaluating:' .. version end
local function begun_key(version) return P .. 'begun:' .. version end
local function evaluation_prompt(version, n) return PROMPT .. 'evaluation:' .. version .. ':' .. n end

-- Frees all keys of an evaluation.
local function forget_evaluation(version)
  local size, samples = unpack(call('HMGET', evaluation_key(version), 'size', 'samples'))
  for n = 0, (size or 0) / (samples or 1) - 1 do call('UNLINK', evaluation_prompt(version, n)) end
  call('UNLINK', evaluation_key(version), evaluating_key(version), begun_key(version))
  call('SREM', EVALUATIONS, version)
end

-- A sample that was leased so long ago, for the first time, and is not done, is given to any worker that asks for it,
-- whoever holds it: its first result counts. A worker keeps a version for `keep` seconds, of which this is a part.
local COPIED_AFTER = 0.25

-- Returns whether a sample has been under way for this part of the time for which workers keep the version.
local function is_begun(version, i, keep, part)
  local begun = call('ZSCORE', begun_key(version), i)
  return begun and now() > begun + part * keep or false
end

-- Returns {holder, is it alive under its name} of ARGV[a], `worker session`. Only living workers get copies.
local function evaluator(a)
  local worker, session = string.match(text(a, 'holder', 200), '^(%w[%w._-]*) (%w+)$')
  if not worker then refuse('holder') end
  local owner = call('GET', P .. 'session:' .. worker)
  return (owner or session) == session and ARGV[a] or worker .. '? ' .. session, owner == session
end

-- Returns the token of a holder's copy of a sample. It contains the run's secret, so nobody can guess that of another.
local function copy_token(version, holder, i)
  return redis.sha1hex(evaluation_key(version) .. ' ' .. holder .. ' ' .. i)
end

-- Frees all evaluations: workers that a new learner finds cannot have its weights yet.
local function forget_evaluations()
  for _, version in ipairs(call('SMEMBERS', EVALUATIONS)) do forget_evaluation(version) end
end

-- evaluate(incarnation, owner, server, version, prompts in all, samples of each, keep_s, number of the first,
-- prompt...)
--   -> OK
-- Asks workers for samples of held-out prompts, of which one call gives some: those of `version`, before it is offered.
-- Workers keep the version for `keep_s` seconds at most. Sample I belongs to prompt I / samples, rounded down.
-- Idempotent. Touches: evaluations, evaluation:*, evaluating:*, prompt:evaluation:*.
owner_verb('evaluate', {}, function()
  local version, prompts, samples, first = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[8])
  if call('SADD', EVALUATIONS, version) == 1 then
    call('HSET', evaluation_key(version), 'size', prompts * samples, 'samples', samples, 'done', 0, 'mixed', 0,
      'seen', now(), 'keep', ARGV[7])
  end
  for a = 9, #ARGV do
    local n = first + a - 9
    if call('SET', evaluation_prompt(version, n), ARGV[a], 'NX') then
      for i = n * samples, (n + 1) * samples - 1 do call('ZADD', evaluating_key(version), 0, i) end
    end
  end
  return redis.status_reply('OK')
end)

-- evaluation(incarnation, owner, server, version, what: look, end or skip)
--   -> {} where there is none, or {samples, samples done, samples that had tokens of other versions,
--       seconds since a worker had a sample for no longer than it keeps the version, {sample, result}...}
-- Tells how far an evaluation is, with the results once all samples are done. `end` forgets the evaluation; so does
-- `skip`, which counts it as one without a result, a repeated call once: the learner skips each version once, in order.
-- Touches: meta, evaluations, evaluation:*, evaluating:*, begun:*, prompt:evaluation:*.
owner_verb('evaluation', { 'allow-oom' }, function()
  local version = ARGV[4]
  if ARGV[5] == 'skip' and meta('skipped_evaluation') ~= version then
    call('HSET', META, 'skipped_evaluation', version)
    count('skipped_evaluations')
  end
  if ARGV[5] ~= 'look' then forget_evaluation(version) return {} end
  local size, done, mixed, seen = unpack(call('HMGET', evaluation_key(version), 'size', 'done', 'mixed', 'seen'))
  if not size then return {} end
  local reply = { tonumber(size), tonumber(done), tonumber(mixed), tostring(math.max(0, now() - seen)) }
  if size == done then
    for i = 0, size - 1 do reply[#reply + 1] = call('HGET', evaluation_key(version), 'result:' .. i) end
  end
  return reply
end)

-- evaluation_lease(version, count, ttl_s, nonce, holder, recipe | '', {sample, token}...)
--   -> {samples that are not done, or -1 where there is no evaluation of the version, {sample that the caller lost...},
--       {sample, token, prompt frame}...}
-- Leases samples of the evaluation of the version that the caller's engine holds, and renews those that it has. A
-- lease that is not renewed expires, and another worker may have the sample. Each worker that serves gets its share at
-- a time, so that several take part where there are several, and one that dies leaves others behind that can go on.
-- Samples that others have had for long are copied to a living worker that has room: no worker can keep them for
-- itself. Touches: evaluating:*, evaluation:*, begun:*; reads session:*, serving, quarantined, prompt:evaluation:*.
verb('evaluation_lease', {}, function()
  local version, wanted = text(1, 'version', 50), whole(2, 'count', 0, 1000)
  local ttl = seconds(3, limit('lease_ttl_s', 3600))
  local nonce, holder, is_alive = text(4, 'nonce', 64), evaluator(5)
  local recipe = text(6, 'recipe', 64)
  if not string.match(nonce, '^%w+$') then refuse('nonce') end
  local key, queue, time = evaluation_key(version), evaluating_key(version), now()
  local size, samples, done, keep = unpack(call('HMGET', key, 'size', 'samples', 'done', 'keep'))
  if not size or call('SISMEMBER', P .. 'quarantined', holder) == 1 then return { -1, {} } end
  if recipe ~= '' and recipe ~= meta('recipe') then return { size - done, {} } end -- it would draw them by other rules

  local held, lost, has_fresh, count = {}, {}, false, 0
  local function note(i)
    held[i] = true
    has_fresh = has_fresh or not is_begun(version, i, keep, 1)
  end
  for a = 7, #ARGV, 2 do
    local i, token = whole(a, 'sample', 0, size - 1), text(a + 1, 'token', 64)
    local is_left = call('ZSCORE', queue, i)
    if is_left and call('HGET', key, 'token:' .. i) == token then
      call('ZADD', queue, time + ttl, i)
      note(i)
    elseif is_left and token == copy_token(version, holder, i) and is_begun(version, i, keep, COPIED_AFTER) then
      note(i)
    else
      lost[#lost + 1] = i
    end
    if held[i] then count = count + 1 end
  end

  local reply, room = { size - done, lost }, math.ceil(size / math.max(1, call('SCARD', P .. 'serving'))) - count
  room = math.min(wanted, room)
  local function grant(i, token)
    note(i)
    reply[#reply + 1] = { i, token, call('GET', evaluation_prompt(version, math.floor(i / samples))) }
    room = room - 1
  end
  if room > 0 then
    for _, i in ipairs(call('ZRANGEBYSCORE', queue, '-inf', time, 'LIMIT', 0, room)) do
      call('ZADD', queue, time + ttl, i)
      call('ZADD', begun_key(version), 'NX', time, i)
      call('HSET', key, 'token:' .. i, nonce, 'by:' .. i, holder)
      grant(tonumber(i), nonce)
    end
  end
  if room > 0 and is_alive then
    local before = time - COPIED_AFTER * keep
    for _, i in ipairs(call('ZRANGEBYSCORE', begun_key(version), '-inf', before, 'LIMIT', 0, 1000)) do
      i = tonumber(i)
      if room > 0 and not held[i] then grant(i, copy_token(version, holder, i)) end
    end
  end
  if has_fresh then call('HSET', key, 'seen', time) end
  return reply
end)

-- evaluation_submit(version, sample, token, oldest version, newest version, passed, reward, response tokens, holder,
--   its components as JSON) -> outcome
-- Hands in the result of an evaluation's sample. The first one under the sample's newest lease, or a copy, counts. A
-- sample that other weights sampled too does not: any worker with the version may have it next.
-- Touches: evaluating:*, evaluation:*, begun:*; reads session:*.
verb('evaluation_submit', { 'allow-oom' }, function()
  local version, i, token = text(1, 'version', 50), whole(2, 'sample', 0, 2147483647), text(3, 'token', 64)
  local oldest, newest, passed = text(4, 'version', 50), text(5, 'version', 50), whole(6, 'passed', 0, 1)
  local reward, tokens, components = text(7, 'reward', 32), whole(8, 'tokens', 0, 2147483647), ARGV[10] or '{}'
  if #components > 20000 then refuse('components') end
  if not string.match(reward, '^%-?%d+%.?%d*e?[+-]?%d*$') or not tonumber(reward) or math.abs(reward) == math.huge then
    refuse('reward')
  end
  local key, queue, holder = evaluation_key(version), evaluating_key(version), evaluator(9)
  local is_left, is_leased = call('ZSCORE', queue, i), call('HGET', key, 'token:' .. i) == token
  if not is_left then return is_leased and 'duplicate' or 'fenced' end
  if not is_leased then
    local keep = call('HGET', key, 'keep')
    local is_copy = token == copy_token(version, holder, i) and is_begun(version, i, keep, COPIED_AFTER)
    if not is_copy then return 'fenced' end
  end
  if oldest ~= version or newest ~= version then
    if is_leased then
      call('ZADD', queue, 0, i)
      call('HDEL', key, 'token:' .. i)
    end
    call('HINCRBY', key, 'mixed', 1)
    return 'other version'
  end
  call('ZREM', queue, i)
  call('ZREM', begun_key(version), i)
  local result = table.concat({ passed, reward, tokens, components }, ' ')
  call('HSET', key, 'seen', now(), 'token:' .. i, token, 'result:' .. i, result)
  call('HINCRBY', key, 'done', 1)
  return 'accepted'
end)

-- evaluation_release(version, {sample, token}...) -> how many leases were given back, for other workers to take.
-- Touches: evaluating:*, evaluation:*.
verb('evaluation_release', { 'allow-oom' }, function()
  local version, n = text(1, 'version', 50), 0
  local key, queue = evaluation_key(version), evaluating_key(version)
  for a = 2, #ARGV, 2 do
    local i = whole(a, 'sample', 0, 2147483647)
    if call('HGET', key, 'token:' .. i) == text(a + 1, 'token', 64) and call('ZSCORE', queue, i) then
      call('ZADD', queue, 0, i)
      call('HDEL', key, 'token:' .. i, 'by:' .. i)
      n = n + 1
    end
  end
  return n
end)
