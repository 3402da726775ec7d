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
