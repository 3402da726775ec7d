-- Transitions of single samples: queued, handed back, refused for the weights that sampled them.

-- Offers all samples of an open group to workers, under the index that it has.
local function enqueue(g, index, round, size)
  local scored = {}
  call('HSET', group_key(g), 'state', 'open', 'index', index, 'queued_at', now())
  for a, m in ipairs(members(g, round, size)) do scored[2 * a - 1], scored[2 * a] = index, m end
  call('ZADD', RETRY, unpack(scored))
end

-- Returns what the weights of each step sampled of a group, as text: `STEP:SAMPLES:TOKENS...`. A sample counts at its
-- oldest step, a token at its own.
local function by_step(g, size)
  local samples, tokens, said = {}, {}, {}
  for _, had in ipairs(by_sample(g, 'tokens', size)) do
    local oldest
    for at = 1, #(had or ''), 12 do
      local _, step, n = struct.unpack('>I4I4I4', had, at)
      if not oldest or step < oldest then oldest = step end
      tokens[step] = (tokens[step] or 0) + n
    end
    if oldest then samples[oldest] = (samples[oldest] or 0) + 1 end
  end
  for step, n in pairs(tokens) do said[#said + 1] = string.format('%d:%d:%d', step, samples[step] or 0, n) end
  return table.concat(said, ' ')
end

-- Lets a group that has all its samples wait for the learner.
local function make_ready(g, floor, size)
  call('HSET', group_key(g), 'state', 'ready', 'ready_at', now(), 'by_step', by_step(g, size))
  call('ZADD', READY, floor, g)
end

-- Ends a sample's lease. Any worker may lease the sample next and go on after its segments.
local function hand_back(m)
  local g, _, i = parse(m)
  local oldest = field(g, 'oldest:' .. i)
  call('HDEL', group_key(g), 'token:' .. i, 'by:' .. i, 'since:' .. i)
  if oldest then call('HSET', group_key(g), 'step:' .. i, oldest) else call('HDEL', group_key(g), 'step:' .. i) end
  call('ZREM', LEASES, m)
  call('ZADD', RETRY, field(g, 'index'), m)
  refloor(g)
end

-- Ends the lease of a void sample and frees its segments. They may be what makes it void: a worker that went on after
-- them would be fenced again.
local function hand_back_anew(g, m, i, has_segments)
  if has_segments then discard_segments(g, m, i) end
  hand_back(m)
end

-- Returns true if the weights belong to a branch that a rewind has abandoned.
local function is_abandoned(incarnation, step)
  forks = forks or call('HGETALL', P .. 'forks')
  for a = 1, #forks, 2 do
    if incarnation < tonumber(forks[a]) and step > tonumber(forks[a + 1]) then return true end
  end
  return false
end

-- A server that loses its last second forgets fewer announcements than this. No worker can have weights that are newer
-- by more steps than the newest that this server remembers.
local FORGOTTEN = 64
local function highest_step()
  highest = highest or number('highest_step')
  return highest
end
local function is_impossible(newest) return newest > highest_step() + FORGOTTEN end

-- Returns the newest step of `versions`, {incarnation, step}..., and true if a rewind has abandoned any of them, or if
-- any is newer than all that the server knows.
local function newest_of(versions)
  local newest, is_void = -1, false
  for b = 1, #versions, 2 do
    if versions[b + 1] > newest then newest = versions[b + 1] end
    is_void = is_void or is_abandoned(versions[b], versions[b + 1])
  end
  return newest, is_void or newest > highest_step()
end

-- Returns true if a sample with tokens of step `oldest` is too old for the next step. With `mask` no sample is.
local function is_over_bound(oldest)
  local announced, lag, on_over_bound = unpack(call('HMGET', META, 'announced_step', 'max_lag', 'on_over_bound'))
  return announced and on_over_bound ~= 'mask' and announced - oldest > tonumber(lag)
end

-- Adds a dead letter and a strike against the holder `by`.
local function blame(m, by, reason)
  to_dead_letters(m, name_of(by), reason, '', by)
  strike(by)
end

local function note_newest(g, had, newest)
  if newest <= (tonumber(had or '') or -1) then return end
  call('HSET', group_key(g), 'newest', newest)
  if newest > number('newest_step') then call('HSET', META, 'newest_step', newest) end
end
