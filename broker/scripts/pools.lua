-- Pools of workers, and their supervisors.

-- The pools whose supervisors were heard of lately: {name, frame, workers wanted...}, by name.
local function alive_pools()
  local names, wanted, flat, alive = call('SMEMBERS', P .. 'pools'), {}, call('HGETALL', P .. 'wanted'), {}
  for a = 1, #flat, 2 do wanted[flat[a]] = tonumber(flat[a + 1]) end
  table.sort(names)
  for _, name in ipairs(names) do
    local frame = call('GET', P .. 'pool:' .. name)
    if frame then
      alive[#alive + 1] = name
      alive[#alive + 1] = frame
      alive[#alive + 1] = wanted[name] or 0
    end
  end
  return alive
end

-- pool(pool, session, ttl in ms, frame, count, restarts) -> {1, workers wanted}, or {0} where another supervisor has
-- the name
-- Stores the report of a pool's supervisor, and returns how many workers are wanted: at first `count`, then the
-- number of the last `scale`. The supervisor keeps the name until it has been silent for `ttl`, a minute at most.
-- `restarts` are all of this supervisor's so far: those that are new are added to the run's.
-- Touches: meta, pool:*, pools, supervisors, wanted, restarted.
verb('pool', { 'allow-oom' }, function()
  local pool, session, LONGEST_MS, MOST = worker_name(1), text(2, 'session', 64), 60000, 256
  local ttl_ms = math.min(whole(3, 'ttl', 1, 1000000000), LONGEST_MS)
  local frame, first, restarts = text(4, 'frame', 4096), whole(5, 'count', 0, 4096), whole(6, 'restarts', 0, 1000000000)
  local POOLS, SUPERVISORS, WANTED, RESTARTED = P .. 'pools', P .. 'supervisors', P .. 'wanted', P .. 'restarted'
  local key, before = P .. 'pool:' .. pool, call('HGET', SUPERVISORS, pool)

  -- Forgets pools whose supervisor has been silent too long, to make room for others.
  local function forget_dead()
    for _, name in ipairs(call('SMEMBERS', POOLS)) do
      if call('EXISTS', P .. 'pool:' .. name) == 0 then
        call('SREM', POOLS, name)
        for _, names in ipairs({ SUPERVISORS, WANTED, RESTARTED }) do call('HDEL', names, name) end
      end
    end
  end

  if before ~= session then
    if call('EXISTS', key) == 1 then return { 0 } end
    if call('SISMEMBER', POOLS, pool) == 0 and call('SCARD', POOLS) >= MOST then
      forget_dead()
      if call('SCARD', POOLS) >= MOST then refuse('pool: ' .. MOST .. ' are alive') end
    end
    call('HSET', SUPERVISORS, pool, session)
    call('HSET', WANTED, pool, first)
    call('HDEL', RESTARTED, pool)
  end
  local counted = tonumber(call('HGET', RESTARTED, pool) or '') or 0
  if restarts > counted then
    count('worker_restarts', restarts - counted)
    call('HSET', RESTARTED, pool, restarts)
  end
  call('SET', key, frame, 'PX', ttl_ms)
  call('SADD', POOLS, pool)
  for _, names in ipairs({ POOLS, SUPERVISORS, WANTED, RESTARTED }) do call('EXPIRE', names, 86400) end
  return { 1, tonumber(call('HGET', WANTED, pool)) or first }
end)

-- scale(pool, 'to' or 'by', workers) -> {workers wanted before, from now on}, or {} where no supervisor has such a pool
-- Only the learner's user may call it: a worker's user may not read `owner`. Touches: wanted; reads: owner, pool:*.
verb('scale', {}, function()
  call('GET', PUBLIC .. 'owner')
  local pool, manner, workers = worker_name(1), text(2, 'manner', 2), whole(3, 'workers', -4096, 4096)
  if call('EXISTS', P .. 'pool:' .. pool) == 0 then return {} end
  local before = tonumber(call('HGET', P .. 'wanted', pool)) or 0
  local wanted = manner == 'by' and before + workers or workers
  wanted = math.max(0, math.min(wanted, 4096))
  call('HSET', P .. 'wanted', pool, wanted)
  return { before, wanted }
end)
