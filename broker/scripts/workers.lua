-- Worker processes: their heartbeats, and their end.

-- Returns {name, heartbeat frame...} of all workers whose last heartbeat has not expired, sorted by name.
local function alive_workers()
  local names, alive = call('SMEMBERS', P .. 'workers'), {}
  table.sort(names)
  for _, name in ipairs(names) do
    local frame = call('GET', P .. 'worker:' .. name)
    if frame then
      alive[#alive + 1] = name
      alive[#alive + 1] = frame
    end
  end
  return alive
end

-- heartbeat(worker, session, ttl in ms, frame, is serving, ttl_s of leases, {member, token}...)
--   -> {1, or 2 where the worker was asked to drain, or 0 where the name belongs to another session; state; number of
--   serving workers, this one included; token of a lease that the worker has lost...}
-- Renews leases first: a report that is refused costs no lease. A copy lasts until its sample is done.
-- The worker counts as alive for `ttl`, two minutes at most, and as serving or not. Its name stays its own for two
-- minutes, so that no other process takes it from a worker that is held up.
-- Touches: worker:*, session:*, workers, serving, leases, retry; reads: dismissed, group:*.
verb('heartbeat', { 'allow-oom' }, function()
  local lost = #ARGV > 6 and renew_leases(6) or {}
  local worker, session, LONGEST_MS = worker_name(1), text(2, 'session', 64), 120000
  local ttl_ms = math.min(whole(3, 'ttl', 1, 1000000000), LONGEST_MS)
  local frame = text(4, 'frame', 16384) -- the frames of all workers go into one answer
  local WORKERS, SERVING, MOST = P .. 'workers', P .. 'serving', 4096

  -- Forgets the workers whose session has expired, to make room for others.
  local function forget_dead()
    for _, name in ipairs(call('SMEMBERS', WORKERS)) do
      if call('EXISTS', P .. 'session:' .. name) == 0 then
        call('SREM', WORKERS, name)
        call('SREM', SERVING, name)
      end
    end
  end

  local state = meta('state') or 'absent'
  if is_of_another(worker, session) then return { 0, state, call('SCARD', SERVING) + 1, unpack(lost) } end
  if call('SISMEMBER', WORKERS, worker) == 0 then
    if call('SCARD', WORKERS) >= MOST then forget_dead() end
    if call('SCARD', WORKERS) >= MOST then refuse('worker: ' .. MOST .. ' are alive') end
  end
  call('SET', P .. 'session:' .. worker, session, 'PX', LONGEST_MS)
  call('SET', P .. 'worker:' .. worker, frame, 'PX', ttl_ms)
  call('SADD', WORKERS, worker)
  call(ARGV[5] == '1' and 'SADD' or 'SREM', SERVING, worker)
  for _, names in ipairs({ WORKERS, SERVING }) do call('EXPIRE', names, 86400) end
  local serving = call('SCARD', SERVING) + (ARGV[5] == '1' and 0 or 1)
  return { call('HGET', P .. 'dismissed', worker) == session and 2 or 1, state, serving, unpack(lost) }
end)

-- workers() -> {name, heartbeat frame...} of all workers that are alive, sorted by name. Reads: workers, worker:*.
verb('workers', { 'no-writes', 'allow-oom' }, function()
  return alive_workers()
end)

-- exclude(worker, 'drain' or 'quarantine') -> 1, or 0 where no worker of that name is alive
-- A worker that drains is told so by its next heartbeat, and hands its work back; one in quarantine gets no more
-- leases. Only the learner's user may ask for it: a worker's user cannot read `owner`. Both hold for the worker's
-- process, not for another one of its name. Touches: dismissed, quarantined; reads: owner, session:*, worker:*.
verb('exclude', {}, function()
  call('GET', PUBLIC .. 'owner')
  local worker, manner = worker_name(1), text(2, 'manner', 10)
  local session = call('GET', P .. 'session:' .. worker)
  if not session or call('EXISTS', P .. 'worker:' .. worker) == 0 then return 0 end
  if manner == 'quarantine' then
    call('SADD', P .. 'quarantined', worker .. ' ' .. session)
  else
    call('HSET', P .. 'dismissed', worker, session)
    call('EXPIRE', P .. 'dismissed', 86400)
  end
  return 1
end)

-- leave(worker, session) -> OK. The worker stops on purpose and is at once no longer listed. A process cannot remove a
-- worker of another session. Touches: worker:*, session:*, workers, serving, dismissed.
verb('leave', { 'allow-oom' }, function()
  local worker = worker_name(1)
  if not is_of_another(worker, ARGV[2]) then
    call('UNLINK', P .. 'worker:' .. worker, P .. 'session:' .. worker)
    for _, names in ipairs({ 'workers', 'serving' }) do call('SREM', P .. names, worker) end
    call('HDEL', P .. 'dismissed', worker)
  end
  return redis.status_reply('OK')
end)

-- report_death(session) -> how many leases were given back. The samples keep their segments.
-- The process with this session has ended without handing them back; its supervisor, which made the session, says so.
-- No other process knows it, so no process can take the leases of a worker that it did not start. A worker that lives
-- all the same, behind a cut network, is fenced like one whose leases have expired, and these count among those.
-- Its turn to swap weights ends, too. Looks at 10000 leases at most: the others expire.
-- Touches: retry, leases, open, group:*, evaluating:*, evaluation:*, turns, turns:*; reads session:*.
verb('report_death', { 'allow-oom' }, function()
  local session, MOST, n = text(1, 'session', 64), 10000, 0
  if #session < 32 or not string.match(session, '^%x+$') then refuse('session') end
  local function is_of(holder) return holder and string.sub(holder, -#session - 1) == ' ' .. session end

  for _, m in ipairs(call('ZRANGE', LEASES, 0, MOST - 1)) do
    local g, _, i = parse(m)
    if is_of(field(g, 'by:' .. i)) then
      hand_back(m)
      n = n + 1
    end
  end
  if n > 0 then count('expired_leases', n) end
  for _, version in ipairs(call('SMEMBERS', EVALUATIONS)) do
    local key, queue = evaluation_key(version), evaluating_key(version)
    for _, i in ipairs(call('ZRANGE', queue, 0, MOST - 1)) do
      if is_of(call('HGET', key, 'by:' .. i)) then
        call('ZADD', queue, 0, i)
        call('HDEL', key, 'token:' .. i, 'by:' .. i)
        n = n + 1
      end
    end
  end
  for _, kind in ipairs({ '', ':others' }) do
    for _, token in ipairs(call('ZRANGE', P .. 'turns' .. kind, 0, -1)) do
      local worker = string.match(token, '^(%w[%w._-]*):')
      if worker and call('GET', P .. 'session:' .. worker) == session then
        call('ZREM', P .. 'turns' .. kind, token)
        call('ZREM', P .. 'turns:begun' .. kind, token)
      end
    end
  end
  return n
end)
