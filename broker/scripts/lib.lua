-- Put in front of every script. KEYS[1] is the run's meta hash; its prefix names all other keys (see broker/keys.py).
-- Blobs never pass through here: scripts see only their keys.
local call = redis.call
local META = KEYS[1]
local P = string.sub(META, 1, -5)
local POOL, RETRY, LEASES, OPEN, READY = P .. 'pool', P .. 'retry', P .. 'leases', P .. 'open', P .. 'ready'
local PINNED, SETTLED, DEAD, FORKS = P .. 'pinned', P .. 'settled', P .. 'dead', P .. 'forks'
local DROPPED, LOST, GARBAGE, TALLY = P .. 'dropped', P .. 'lost', P .. 'garbage', P .. 'tally'

-- An out-of-memory server refuses a script's first write if it may need memory, but none after one that frees.
local function free_first() call('UNLINK', P .. 'none') end

local function now() local t = call('TIME') return t[1] + t[2] / 1e6 end
local function meta(field) return call('HGET', META, field) end
local function number(field) return tonumber(meta(field) or '') or 0 end
-- Counters never bring back the meta hash of a run that was deleted.
local function count(field, n) if call('EXISTS', META) == 1 then call('HINCRBY', META, field, n or 1) end end
local function tally(what, key, n) call('HINCRBY', TALLY, what .. ':' .. key, n or 1) end
local function server_id() return string.match(call('INFO', 'server'), 'run_id:(%x+)') end

local function group_key(g) return P .. 'group:' .. g end
local function batch_key(step) return P .. 'batch:' .. step end
local function member(g, round, i) return g .. ':' .. round .. ':' .. i end
local function parse(m) return string.match(m, '^(.+):(%d+):(%d+)$') end
local function segments_key(m) return P .. 'segments:' .. m end
local function field(g, name) return call('HGET', group_key(g), name) end
local function size_of(g) return tonumber(field(g, 'size')) end

-- nil, or the error to return: the server is another one than the caller knew, or the caller no longer owns the run.
local function fence(incarnation, token, server)
  if server and server ~= '' and server ~= server_id() then return redis.error_reply('RESTARTED ' .. server_id()) end
  local held = call('HMGET', META, 'incarnation', 'owner')
  if held[1] ~= incarnation or held[2] ~= redis.sha1hex(token) then return redis.error_reply('FENCED ' .. (held[1] or 'nobody')) end
end

-- A blob is named by its key below the run's prefix. One that begins with a number and a slash lies on another shard of
-- a cluster, where only clients reach: it goes through the garbage list.
local function is_remote(name) return string.find(name, '^%d+/') end
local function free_blob(name) if is_remote(name) then call('RPUSH', GARBAGE, name) else call('UNLINK', P .. name) end end
-- Takes the time to live off a blob; false if it is gone.
local function keep_blob(name)
  return is_remote(name) or call('PERSIST', P .. name) == 1 or call('EXISTS', P .. name) == 1
end

local function to_dead_letters(tid, reason, head)
  count('rejected')
  call('XADD', DEAD, 'MAXLEN', '~', 1000, '*', 'tid', tid, 'reason', reason, 'head', head)
end

local function announced_step() return tonumber(meta('announced_step') or '') end

-- The floor of a group: the lowest weight step among its leases and its submissions in this round.
local function refloor(g)
  local names, floor = {}, nil
  for i = 0, size_of(g) - 1 do names[#names + 1] = 'step:' .. i end
  for _, step in ipairs(call('HMGET', group_key(g), unpack(names))) do
    if step then floor = math.min(floor or tonumber(step), tonumber(step)) end
  end
  if not floor then call('HDEL', group_key(g), 'floor') call('ZREM', OPEN, g) return end
  call('HSET', group_key(g), 'floor', floor)
  if field(g, 'state') == 'open' then call('ZADD', OPEN, floor, g) end
end

local function parse_segment(entry) return string.match(entry, '^(%S+) (%d+) (%d+)$') end

-- Frees the segments of sample i; their bytes and tokens.
local function free_segments(g, m, i)
  local bytes, tokens = 0, 0
  if not field(g, 'oldest:' .. i) then return bytes, tokens end
  for _, entry in ipairs(call('LRANGE', segments_key(m), 0, -1)) do
    local name, b, t = parse_segment(entry)
    free_blob(name)
    bytes, tokens = bytes + b, tokens + t
  end
  call('UNLINK', segments_key(m))
  call('HDEL', group_key(g), 'oldest:' .. i)
  if bytes > 0 then
    call('HINCRBY', group_key(g), 'bytes', -bytes)
    count('payload_bytes', -bytes)
  end
  return bytes, tokens
end

-- The same for segments that nobody can use any more.
local function discard_segments(g, m, i)
  local _, tokens = free_segments(g, m, i)
  if tokens > 0 then count('discarded_tokens', tokens) end
end

-- Frees what the current round of a group has produced, and takes its samples from every queue: leases are fenced.
local function clear_round(g)
  local round, names = field(g, 'round'), { 'floor', 'newest', 'bytes', 'done', 'pin', 'trimmed' }
  for i = 0, size_of(g) - 1 do
    local payload, m = field(g, 'payload:' .. i), member(g, round, i)
    if payload then free_blob(payload) end
    discard_segments(g, m, i)
    call('ZREM', LEASES, m)
    call('ZREM', RETRY, m)
    for _, name in ipairs({ 'token:', 'step:', 'payload:' }) do names[#names + 1] = name .. i end
  end
  call('ZREM', OPEN, g)
  call('ZREM', READY, g)
  local pin = field(g, 'pin')
  if pin then call('LREM', batch_key(pin), 0, g) end
  count('payload_bytes', 0 - (tonumber(field(g, 'bytes') or '') or 0)) -- never -0, which is no integer to the server
  call('HDEL', group_key(g), unpack(names))
end

-- Are all samples there that the group is to be trained with?
local function is_whole(g)
  return tonumber(field(g, 'done') or '') == size_of(g) or field(g, 'trimmed') == '1'
end

local function enqueue(g)
  local round, index = field(g, 'round'), field(g, 'index')
  for i = 0, size_of(g) - 1 do call('ZADD', RETRY, index, member(g, round, i)) end
end

-- A group's next round: all of it is generated anew under the same index. Without its prompt it can only be fed again.
local function requeue(g)
  clear_round(g)
  if call('EXISTS', P .. 'prompt:' .. g) == 0 then
    call('UNLINK', group_key(g))
    call('SADD', LOST, g)
    count('admitted', -1)
    return
  end
  call('HINCRBY', group_key(g), 'round', 1)
  call('HSET', group_key(g), 'state', 'open')
  enqueue(g)
end

-- A sample without its lease again: others may take it, and go on after its segments.
local function hand_back(m)
  local g, _, i = parse(m)
  local oldest = field(g, 'oldest:' .. i)
  call('HDEL', group_key(g), 'token:' .. i)
  if oldest then call('HSET', group_key(g), 'step:' .. i, oldest) else call('HDEL', group_key(g), 'step:' .. i) end
  call('ZREM', LEASES, m)
  call('ZADD', RETRY, field(g, 'index'), m)
  refloor(g)
end

-- {incarnation, its newest step}... from ARGV[a] on: the newest step of all, and whether any was abandoned by a rewind.
local is_abandoned
local function newest_of(a)
  local newest, is_void = -1, false
  for b = a, #ARGV, 2 do
    newest = math.max(newest, tonumber(ARGV[b + 1]))
    is_void = is_void or is_abandoned(tonumber(ARGV[b]), tonumber(ARGV[b + 1]))
  end
  return newest, is_void
end

local function note_newest(g, newest)
  if newest <= (tonumber(field(g, 'newest') or '') or -1) then return end
  call('HSET', group_key(g), 'newest', newest)
  if newest > number('newest_step') then call('HSET', META, 'newest_step', newest) end
end

-- Are these weights of a branch that a rewind left behind?
function is_abandoned(incarnation, step)
  local forks = call('HGETALL', FORKS)
  for a = 1, #forks, 2 do
    if incarnation < tonumber(forks[a]) and step > tonumber(forks[a + 1]) then return true end
  end
  return false
end

-- The incarnation goes on from the weights of `step`, below those announced before. What was sampled by weights above
-- them is generated anew; what is still being generated by them is refused when it is submitted.
local function fork(incarnation, step)
  local forks, queues = call('HGETALL', FORKS), { call('ZRANGE', OPEN, 0, -1), call('ZRANGE', READY, 0, -1) }
  for a = 1, #forks, 2 do
    if tonumber(forks[a + 1]) >= step then call('HDEL', FORKS, forks[a]) end -- this fork says more
  end
  call('HSET', FORKS, incarnation, step)
  local steps = call('ZRANGEBYSCORE', PINNED, step, '+inf')
  for _, s in ipairs(steps) do queues[#queues + 1] = call('LRANGE', batch_key(s), 0, -1) end
  for _, queue in ipairs(queues) do
    for _, g in ipairs(queue) do
      if (tonumber(field(g, 'newest') or '') or -1) > step then requeue(g) count('requeued') end
    end
  end
  for _, s in ipairs(steps) do if call('EXISTS', batch_key(s)) == 0 then call('ZREM', PINNED, s) end end
end

-- Trained or dropped: nothing of the group stays but its name, and that only while a feed could name it again.
local function settle(g, names)
  clear_round(g)
  call('UNLINK', P .. 'prompt:' .. g, group_key(g))
  call('ZREM', POOL, g)
  if g >= (meta('watermark') or '') then call('ZADD', names, 0, g) end
end

local function is_settled(g)
  return call('ZSCORE', SETTLED, g) or call('ZSCORE', DROPPED, g) or (call('EXISTS', group_key(g)) == 0 and g < (meta('watermark') or ''))
end

-- Trained for good, as the learner remembers it, whatever a rolled back server does.
local function settle_trained(g)
  if is_settled(g) then return 0 end
  local had = call('HMGET', group_key(g), 'state', 'length', 'pin', 'floor')
  if not had[1] or had[1] == 'pool' then count('admitted') end
  if had[2] then tally('trained_by_prompt_length', had[2]) end
  if had[3] and had[4] then tally('trained_by_lag', had[3] - had[4]) end
  if had[1] then settle(g, SETTLED) elseif g >= (meta('watermark') or '') then call('ZADD', SETTLED, 0, g) end
  count('trained')
  return 1
end

local function raise_watermark(mark)
  if mark == '' or mark <= (meta('watermark') or '') then return end
  call('HSET', META, 'watermark', mark)
  for _, names in ipairs({ SETTLED, DROPPED }) do call('ZREMRANGEBYLEX', names, '-', '(' .. mark) end
end

-- All groups that the run holds.
local function held_groups()
  local held = {}
  for _, queue in ipairs({ POOL, OPEN, READY }) do for _, g in ipairs(call('ZRANGE', queue, 0, -1)) do held[g] = true end end
  for _, m in ipairs(call('ZRANGE', RETRY, 0, -1)) do held[(parse(m))] = true end
  for _, s in ipairs(call('ZRANGE', PINNED, 0, -1)) do
    for _, g in ipairs(call('LRANGE', batch_key(s), 0, -1)) do held[g] = true end
  end
  return held
end

-- What a checkpoint contains is settled, whatever the server remembers: all below its watermark and ARGV[a], ARGV[a+1]...
local function settle_contained(mark, a)
  raise_watermark(mark)
  for g in pairs(held_groups()) do if g < mark then settle_trained(g) end end
  for b = a, #ARGV do settle_trained(ARGV[b]) end
end

local function commit_below(step)
  local n = 0
  for _, pinned in ipairs(call('ZRANGEBYSCORE', PINNED, '-inf', '(' .. step)) do
    for _, g in ipairs(call('LRANGE', batch_key(pinned), 0, -1)) do n = n + settle_trained(g) end
    call('UNLINK', batch_key(pinned))
    call('ZREM', PINNED, pinned)
  end
  if tonumber(step) > number('committed_step') then call('HSET', META, 'committed_step', step) end
  return n
end

-- Admission numbers counted anew from the first step not yet trained: after a rewind, a lost server, or new rules.
local function renumber(step)
  local held, pinned = {}, 0
  for _, s in ipairs(call('ZRANGEBYSCORE', PINNED, step, '+inf')) do pinned = pinned + call('LLEN', batch_key(s)) end
  local function hold(g) held[g] = tonumber(field(g, 'index')) end
  for _, queue in ipairs({ OPEN, READY }) do for _, g in ipairs(call('ZRANGE', queue, 0, -1)) do hold(g) end end
  for _, m in ipairs(call('ZRANGE', RETRY, 0, -1)) do hold((parse(m))) end
  local order = {}
  for g in pairs(held) do order[#order + 1] = g end
  table.sort(order, function(a, b) if held[a] == held[b] then return a < b end return held[a] < held[b] end)
  local index = step * number('groups_per_step') + pinned
  for _, g in ipairs(order) do
    call('HSET', group_key(g), 'index', index)
    for i = 0, size_of(g) - 1 do call('ZADD', RETRY, 'XX', index, member(g, field(g, 'round'), i)) end
    index = index + 1
  end
  call('HSET', META, 'admitted', index + number('dropped'))
  call('HSET', META, 'trained', step * number('groups_per_step'))
end
