-- When engines pause: swap turns, and the phases of a colocated run.

-- swap_turn(token, session, ttl_s, share of the serving workers, or nothing: renew only)
--   -> 1 if the token holds a turn now, else 0
-- A swap turn is the right, until a deadline, to pause an engine and swap its weights while others generate (not a
-- turn of an episode). It is granted while fewer than `share` of the serving workers, rounded down, hold one, and
-- always while no worker does. It ends when it is given back (end_swap_turn), at its deadline, or after LONGEST_S. A
-- worker that had one waits for those that ask and had none since. A token begins with its worker's name; those that no
-- serving worker of this session asks for have turns of their own, which hold up no worker.
-- Touches: turns, turns:*, serving; reads session:*.
verb('swap_turn', { 'allow-oom' }, function()
  local LONGEST_S, ASKS_S = 60, 1
  local token, session = text(1, 'token', 200), text(2, 'session', 64)
  local time, ttl_s, SERVING = now(), seconds(3, 600), P .. 'serving'
  local share = ARGV[4] and seconds(4, 1)
  local worker = string.match(token, '^(%w[%w._-]*):')
  local serves = worker and call('SISMEMBER', SERVING, worker) == 1
    and call('GET', P .. 'session:' .. worker) == session
  local kind = serves and '' or ':others'
  local TURNS, BEGUN = P .. 'turns' .. kind, P .. 'turns:begun' .. kind
  local ASKING, LAST = P .. 'turns:asking', P .. 'turns:last'

  local function finish(one)
    call('ZREM', TURNS, one)
    call('ZREM', BEGUN, one)
  end
  for _, one in ipairs(call('ZRANGEBYSCORE', TURNS, '-inf', time)) do finish(one) end
  for _, one in ipairs(call('ZRANGEBYSCORE', BEGUN, '-inf', time - LONGEST_S)) do finish(one) end
  local others, is_held = 0, false
  for _, one in ipairs(call('ZRANGE', TURNS, 0, -1)) do
    if one == token then is_held = true else others = others + 1 end
  end

  -- Returns how many serving workers are alive, and forgets the others; a later heartbeat adds such a worker again.
  local function serving()
    local alive = 0
    for _, name in ipairs(call('SMEMBERS', SERVING)) do
      if call('EXISTS', P .. 'worker:' .. name) == 1 then
        alive = alive + 1
      else
        call('SREM', SERVING, name)
      end
    end
    return alive
  end

  -- Returns how many workers ask now and have waited since before this one's last turn.
  local function earlier()
    local last, count = tonumber(call('ZSCORE', LAST, worker) or 0), 0
    for _, name in ipairs(call('ZRANGEBYSCORE', ASKING, time - ASKS_S, '+inf')) do
      if name ~= worker and tonumber(call('ZSCORE', LAST, name) or 0) < last then count = count + 1 end
    end
    return count
  end

  if not is_held then
    if not share then return 0 end
    local places = math.max(1, math.floor(serving() * share)) - others
    if places <= (serves and places > 0 and earlier() or 0) then
      if serves then
        call('ZADD', ASKING, time, worker)
        call('EXPIRE', ASKING, 60)
      end
      return 0
    end
    call('ZADD', BEGUN, time, token)
    if serves then
      call('ZREM', ASKING, worker)
      call('ZADD', LAST, time, worker)
      call('EXPIRE', LAST, 3600)
    end
  end
  call('ZADD', TURNS, time + ttl_s, token)
  local last = call('ZRANGE', TURNS, -1, -1, 'WITHSCORES')[2]
  for _, key in ipairs({ TURNS, BEGUN }) do call('EXPIRE', key, math.ceil(tonumber(last) - time) + 1) end
  return 1
end)

-- end_swap_turn(token) -> OK. Gives a swap turn back: another worker may have it at once.
-- Touches: turns, turns:*.
verb('end_swap_turn', { 'allow-oom' }, function()
  for _, name in ipairs({ 'turns', 'turns:begun', 'turns:others', 'turns:begun:others' }) do
    call('ZREM', P .. name, ARGV[1])
  end
  return redis.status_reply('OK')
end)

-- phase(incarnation, owner, server, ttl_s) -> {worker that is awake...}
-- Engines may generate for `ttl_s` seconds from now; 0 ends the phase, and awake engines fall asleep.
-- Touches: phase, awake.
owner_verb('phase', { 'allow-oom' }, function()
  local PHASE, AWAKE, ttl_s = P .. 'phase', P .. 'awake', tonumber(ARGV[4])
  -- The value is the server's id: one that lost its last second may remember a phase that is over, with another id.
  if ttl_s > 0 then call('SET', PHASE, server_id(), 'PX', math.ceil(1000 * ttl_s)) else call('UNLINK', PHASE) end
  for _, worker in ipairs(call('ZRANGEBYSCORE', AWAKE, '-inf', now())) do call('ZREM', AWAKE, worker) end
  local names = {}
  for n, holder in ipairs(call('ZRANGE', AWAKE, 0, -1)) do names[n] = name_of(holder) end
  return names
end)

-- awake(worker, session, ttl_s, is awake) -> 1 if engines may generate now, else 0
-- If engines may generate, or the worker says that its engine is still awake, the worker counts as awake for `ttl_s`
-- seconds. Once the phase is over, no further worker joins those that the learner waits for. Touches: phase, awake.
verb('awake', { 'allow-oom' }, function()
  local worker, session, ttl_s = worker_name(1), text(2, 'session', 64), seconds(3, 60)
  local AWAKE, may, MOST = P .. 'awake', call('GET', P .. 'phase') == server_id(), 4096
  if may or ARGV[4] == '1' then
    local holder = worker .. ' ' .. session
    if call('ZCARD', AWAKE) >= MOST and not call('ZSCORE', AWAKE, holder) then
      for _, other in ipairs(call('ZRANGEBYSCORE', AWAKE, '-inf', now())) do call('ZREM', AWAKE, other) end
      if call('ZCARD', AWAKE) >= MOST then refuse('worker: ' .. MOST .. ' are awake') end
    end
    call('ZADD', AWAKE, now() + ttl_s, holder)
    call('EXPIRE', AWAKE, 86400)
  end
  return may and 1 or 0
end)

-- asleep(worker, session) -> OK. The worker's engine holds no memory on the device any more. Touches: awake.
verb('asleep', { 'allow-oom' }, function()
  call('ZREM', P .. 'awake', worker_name(1) .. ' ' .. text(2, 'session', 64))
  return redis.status_reply('OK')
end)

-- engines_awake() -> 1 if engines may generate now, or some are still awake, else 0. Reads: phase, awake.
verb('engines_awake', { 'no-writes', 'allow-oom' }, function()
  if call('GET', P .. 'phase') == server_id() then return 1 end
  return #call('ZRANGEBYSCORE', P .. 'awake', now(), '+inf', 'LIMIT', 0, 1)
end)
