-- Transitions of whole groups: requeue, fork, settle, renumber.
local POOL, PINNED, SETTLED, DROPPED = P .. 'pool', P .. 'pinned', P .. 'settled', P .. 'dropped'
local LOST, FORKS, GIVEN_UP = P .. 'lost', P .. 'forks', P .. 'given_up'

-- Raises the highest step whose weights workers may have received.
local function raise_highest(step)
  if step > number('highest_step') then call('HSET', META, 'highest_step', step) end
end

local function batch_key(step) return P .. 'batch:' .. step end
local function size_of(g) return tonumber(field(g, 'size')) end

local function announced_step() return tonumber(meta('announced_step') or '') end

-- Returns {size, round, pin, state, bytes, floor, length} of a group; false where it has no such field.
local function group_record(g)
  return call('HMGET', group_key(g), 'size', 'round', 'pin', 'state', 'bytes', 'floor', 'length')
end

-- Frees the blobs of a group's current round and takes its samples from every queue, which fences their leases.
-- `record` is what `group_record` returned. Returns the group's size, and false if it is pinned, and in no queue.
local function free_round(g, record)
  local size, round, pin, state, bytes = unpack(record, 1, 5)
  local all, is_queued, blobs = members(g, round, size), state ~= 'pinned', by_sample(g, 'oldest payload', size)
  for i, m in ipairs(all) do
    if blobs[i] then
      discard_segments(g, m, i - 1)
      bytes = field(g, 'bytes')
    end
  end
  free_blobs({ unpack(blobs, #all + 1) })
  if is_queued then
    for _, queue in ipairs({ LEASES, RETRY }) do call('ZREM', queue, unpack(all)) end
    for _, queue in ipairs({ OPEN, READY }) do call('ZREM', queue, g) end
  end
  if pin then call('LREM', batch_key(pin), 0, g) end
  if (tonumber(bytes or '') or 0) > 0 then count('payload_bytes', -bytes) end
  return size, is_queued
end

-- Frees the current round of a group that stays in the run, and removes the round's fields from its hash.
-- Returns the group's size.
local function clear_round(g)
  local names = { 'floor', 'newest', 'bytes', 'done', 'pin', 'trimmed', 'ready_at', 'by_step', 'waited' }
  local size = free_round(g, group_record(g))
  for i = 0, size - 1 do
    for _, name in ipairs({ 'token:', 'step:', 'tokens:', 'by:', 'since:', 'bytes:', 'payload:', 'calls:' }) do
      names[#names + 1] = name .. i
    end
  end
  call('HDEL', group_key(g), unpack(names))
  return size
end

-- Returns true if all samples are there with which the group is to be trained.
local function is_whole(g)
  local done, size, trimmed = fields(g, 'done', 'size', 'trimmed')
  return done == size or trimmed == '1'
end

-- Begins a group's next round: all of its samples are generated anew under the same index. A group whose prompt is
-- gone waits until the learner feeds it again.
local function requeue(g)
  local size = clear_round(g)
  local round = call('HINCRBY', group_key(g), 'round', 1)
  if call('EXISTS', PROMPT .. g) == 0 then
    call('HSET', group_key(g), 'state', 'lost')
    call('SADD', LOST, g)
    return
  end
  enqueue(g, field(g, 'index'), round, size)
end

-- Has sample i of a pinned group generated anew in the same round. The group is open until that sample is submitted.
local function redo(g, i)
  local round, pin, index, payload, bytes = fields(g, 'round', 'pin', 'index', 'payload:' .. i, 'bytes:' .. i)
  call('LREM', batch_key(pin), 0, g)
  free_blob(payload)
  call('HINCRBY', group_key(g), 'bytes', -bytes)
  count('payload_bytes', -bytes)
  call('HDEL', group_key(g), 'pin', 'token:' .. i, 'step:' .. i, 'tokens:' .. i, 'by:' .. i, 'since:' .. i,
    'bytes:' .. i, 'payload:' .. i, 'calls:' .. i)
  call('HSET', group_key(g), 'state', 'open')
  call('HINCRBY', group_key(g), 'done', -1)
  call('ZADD', RETRY, index, member(g, round, i))
  refloor(g)
end

-- Takes a pinned group out of its step's batch: it is ready again if it is whole, and is generated anew otherwise.
local function unpin(g)
  if not is_whole(g) then return requeue(g) end
  local pin, floor, size = fields(g, 'pin', 'floor', 'size')
  call('LREM', batch_key(pin), 0, g)
  call('HDEL', group_key(g), 'pin')
  make_ready(g, floor, size)
end

-- Records that the incarnation goes on from the weights of `step`, which are older than those announced before. Groups
-- that were sampled with newer weights are generated anew; samples that workers still generate with those weights are
-- refused when they are submitted.
local function fork(incarnation, step)
  local forks = call('HGETALL', FORKS)
  for a = 1, #forks, 2 do
    if tonumber(forks[a + 1]) >= step then call('HDEL', FORKS, forks[a]) end -- the new fork covers that one
  end
  call('HSET', FORKS, incarnation, step)
  for _, s in ipairs(call('ZRANGEBYSCORE', PINNED, step, '+inf')) do
    for _, g in ipairs(call('LRANGE', batch_key(s), 0, -1)) do unpin(g) end
    call('ZREM', PINNED, s)
  end
  for _, queue in ipairs({ OPEN, READY }) do
    for _, g in ipairs(call('ZRANGE', queue, 0, -1)) do
      if (tonumber(field(g, 'newest') or '') or -1) > step then requeue(g) count('requeued') end
    end
  end
end

-- Records that the batch of `step` will not be the one that an earlier incarnation trained: samples of that
-- incarnation's weights above `step` are abandoned.
local function give_up_reproducing(step)
  local incarnation = meta('incarnation')
  if (tonumber(call('HGET', FORKS, incarnation) or '') or -1) > step then fork(incarnation, step) end
end

-- Removes a group that was trained or dropped. Its name stays in `names` as long as a feed could name it again.
local function settle(g, names, record)
  local size, is_queued = free_round(g, record)
  if is_any_refused() then
    for i = 0, size - 1 do call('SREM', REFUSED, g .. ':' .. i) end
  end
  call('UNLINK', PROMPT .. g, group_key(g))
  if is_queued then
    call('ZREM', POOL, g)
    call('SREM', LOST, g)
  end
  if g >= (meta('watermark') or '') then call('ZADD', names, 0, g) end
end

-- Settles a group that a stated rule drops. Displays count such groups by the step of the oldest weights that sampled
-- them; no more than the newest versions are kept.
local function settle_dropped(g)
  local record = group_record(g)
  local floor = tonumber(record[6] or '')
  if floor then
    call('ZADD', GIVEN_UP, floor, g)
    call('ZREMRANGEBYSCORE', GIVEN_UP, '-inf', floor - SHOWN_VERSIONS)
  end
  settle(g, DROPPED, record)
end

local function is_settled(g)
  return call('ZSCORE', SETTLED, g) or call('ZSCORE', DROPPED, g)
    or (call('EXISTS', group_key(g)) == 0 and g < (meta('watermark') or ''))
end

-- Gives standing to the holders of a group's samples, once in a call, and takes it from those that have not asked for
-- long.
local function raise_standing(g, size)
  if not risen then
    risen = {}
    call('ZREMRANGEBYSCORE', STANDING, '-inf', now() - STANDING_S)
  end
  for _, holder in ipairs(by_sample(g, 'by', size)) do
    if holder and not risen[holder] then
      call('ZADD', STANDING, now(), holder)
      risen[holder] = true
    end
  end
end

-- Settles a group that the learner has trained for good, even where a server that lost writes has another state of it.
-- Returns 1, or 0 if the group was settled already.
local function settle_trained(g)
  local record = group_record(g)
  local size, _, pin, state, _, floor, length = unpack(record)
  if not state and is_settled(g) then return 0 end
  if not state or state == 'pool' then count('admitted') end
  if length then tally('trained_by_prompt_length', length) end
  if pin then raise_standing(g, size) end
  if pin and floor then tally('trained_by_lag', pin - floor) end
  if state then settle(g, SETTLED, record) elseif g >= (meta('watermark') or '') then call('ZADD', SETTLED, 0, g) end
  count('trained')
  return 1
end

local function raise_watermark(mark)
  if mark == '' or mark <= (meta('watermark') or '') then return end
  call('HSET', META, 'watermark', mark)
  for _, names in ipairs({ SETTLED, DROPPED }) do call('ZREMRANGEBYLEX', names, '-', '(' .. mark) end
end

-- Returns all groups that the run holds: {group = true}.
local function held_groups()
  local held = {}
  for _, queue in ipairs({ POOL, OPEN, READY }) do
    for _, g in ipairs(call('ZRANGE', queue, 0, -1)) do held[g] = true end
  end
  for _, m in ipairs(call('ZRANGE', RETRY, 0, -1)) do held[(parse(m))] = true end
  for _, g in ipairs(call('SMEMBERS', LOST)) do held[g] = true end
  for _, s in ipairs(call('ZRANGE', PINNED, 0, -1)) do
    for _, g in ipairs(call('LRANGE', batch_key(s), 0, -1)) do held[g] = true end
  end
  return held
end

-- Settles all groups that a checkpoint contains, whatever state the server has them in: those below the checkpoint's
-- watermark, and ARGV[a] to ARGV[last].
local function settle_contained(mark, a, last)
  raise_watermark(mark)
  for g in pairs(held_groups()) do if g < mark then settle_trained(g) end end
  for b = a, last do settle_trained(ARGV[b]) end
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

-- Gives groups new indices, counted from the first step that is not trained yet: after a claim, a rewind or a
-- re-assertion.
local function renumber(step)
  step = math.max(step, number('committed_step')) -- the steps that the learner replays from its own log are settled
  local held, pinned = {}, 0
  for _, s in ipairs(call('ZRANGEBYSCORE', PINNED, step, '+inf')) do pinned = pinned + call('LLEN', batch_key(s)) end
  local function hold(g) held[g] = tonumber(field(g, 'index')) end
  for _, queue in ipairs({ OPEN, READY }) do for _, g in ipairs(call('ZRANGE', queue, 0, -1)) do hold(g) end end
  for _, m in ipairs(call('ZRANGE', RETRY, 0, -1)) do hold((parse(m))) end
  for _, g in ipairs(call('SMEMBERS', LOST)) do if field(g, 'state') == 'lost' then hold(g) end end
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
