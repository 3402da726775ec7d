-- include: lib_base lib_arguments
-- flags: allow-oom
-- pool(pool, session, ttl in ms, frame, count) -> {1, workers wanted}, or {0} where another supervisor has the pool's name
-- The supervisor of a pool says what it runs, and is told how many workers are wanted: `count` when it begins, then what
-- `scale` said last. Its name stays its own until it was silent for so long, a minute at most.
-- Touches: pool:*, pools, supervisors, wanted.
local pool, session, LONGEST_MS, MOST = worker_name(1), text(2, 'session', 64), 60000, 256
local ttl_ms = math.min(whole(3, 'ttl', 1, 1000000000), LONGEST_MS)
local frame, count = text(4, 'frame', 4096), whole(5, 'count', 0, 4096)
local POOLS, SUPERVISORS, WANTED = P .. 'pools', P .. 'supervisors', P .. 'wanted'
local key, before = P .. 'pool:' .. pool, call('HGET', SUPERVISORS, pool)

-- Names that are no supervisor's any more make room for others.
local function forget_dead()
  for _, name in ipairs(call('SMEMBERS', POOLS)) do
    if call('EXISTS', P .. 'pool:' .. name) == 0 then
      call('SREM', POOLS, name)
      for _, names in ipairs({ SUPERVISORS, WANTED }) do call('HDEL', names, name) end
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
  call('HSET', WANTED, pool, count)
end
call('SET', key, frame, 'PX', ttl_ms)
call('SADD', POOLS, pool)
for _, names in ipairs({ POOLS, SUPERVISORS, WANTED }) do call('EXPIRE', names, 86400) end
return { 1, tonumber(call('HGET', WANTED, pool)) or count }
