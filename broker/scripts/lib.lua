-- Put in front of every script. KEYS[1] is the run's meta hash; its prefix names all other keys (see broker/keys.py).
-- Blobs never pass through here: scripts see only their keys.
local call = redis.call
local META = KEYS[1]
local P = string.sub(META, 1, -5)
local POOL, RETRY, LEASES, OPEN, READY = P .. 'pool', P .. 'retry', P .. 'leases', P .. 'open', P .. 'ready'
local PINNED, SETTLED, DEAD = P .. 'pinned', P .. 'settled', P .. 'dead'

-- An out-of-memory server refuses a script's first write if it may need memory, but none after one that frees.
local function free_first() call('UNLINK', P .. 'none') end

local function now() local t = call('TIME') return t[1] + t[2] / 1e6 end
local function meta(field) return call('HGET', META, field) end
local function number(field) return tonumber(meta(field) or '') or 0 end
-- Counters never bring back the meta hash of a run that was deleted.
local function count(field, n) if call('EXISTS', META) == 1 then call('HINCRBY', META, field, n or 1) end end
local function server_id() return string.match(call('INFO', 'server'), 'run_id:(%x+)') end

local function group_key(g) return P .. 'group:' .. g end
local function batch_key(step) return P .. 'batch:' .. step end
local function member(g, round, i) return g .. ':' .. round .. ':' .. i end
local function parse(m) return string.match(m, '^(.+):(%d+):(%d+)$') end
local function field(g, name) return call('HGET', group_key(g), name) end
local function size_of(g) return tonumber(field(g, 'size')) end

-- nil, or the error to return: the server is another one than the caller knew, or the caller no longer owns the run.
local function fence(incarnation, token, server)
  if server and server ~= '' and server ~= server_id() then return redis.error_reply('RESTARTED ' .. server_id()) end
  local held = call('HMGET', META, 'incarnation', 'owner')
  if held[1] ~= incarnation or held[2] ~= token then return redis.error_reply('FENCED ' .. (held[1] or 'nobody')) end
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

-- Frees what the current round of a group has produced, and takes its samples from every queue: leases are fenced.
local function clear_round(g)
  local round, names = field(g, 'round'), { 'floor', 'newest', 'bytes', 'done', 'pin' }
  for i = 0, size_of(g) - 1 do
    local payload = field(g, 'payload:' .. i)
    if payload then call('UNLINK', P .. payload) end
    call('ZREM', LEASES, member(g, round, i))
    call('ZREM', RETRY, member(g, round, i))
    for _, name in ipairs({ 'token:', 'step:', 'payload:' }) do names[#names + 1] = name .. i end
  end
  call('ZREM', OPEN, g)
  call('ZREM', READY, g)
  local pin = field(g, 'pin')
  if pin then call('LREM', batch_key(pin), 0, g) end
  count('payload_bytes', 0 - (tonumber(field(g, 'bytes') or '') or 0)) -- never -0, which is no integer to the server
  call('HDEL', group_key(g), unpack(names))
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
    count('admitted', -1)
    return
  end
  call('HINCRBY', group_key(g), 'round', 1)
  call('HSET', group_key(g), 'state', 'open')
  enqueue(g)
end

-- Trained or dropped: nothing of the group stays but its name, and that only while a feed could name it again.
local function settle(g)
  clear_round(g)
  call('UNLINK', P .. 'prompt:' .. g, group_key(g))
  call('ZREM', POOL, g)
  if g >= (meta('watermark') or '') then call('ZADD', SETTLED, 0, g) end
end

local function is_settled(g)
  return call('ZSCORE', SETTLED, g) or (call('EXISTS', group_key(g)) == 0 and g < (meta('watermark') or ''))
end

-- Trained for good, as the learner remembers it, whatever a rolled back server does.
local function settle_trained(g)
  if is_settled(g) then return 0 end
  local state = field(g, 'state')
  if not state or state == 'pool' then count('admitted') end
  if state then settle(g) else call('ZADD', SETTLED, 0, g) end
  count('trained')
  return 1
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
