-- Samples and their groups: the fields of a group, blobs, segments, dead letters, and transitions of single samples:
-- queued, handed back, refused for the weights that sampled them.
local function group_key(g) return P .. 'group:' .. g end
local function member(g, round, i) return g .. ':' .. round .. ':' .. i end
local function segments_key(m) return P .. 'segments:' .. m end
local function field(g, name) return call('HGET', group_key(g), name) end
local function fields(g, ...) return unpack(call('HMGET', group_key(g), ...)) end
-- Text of the numbers from 0 on, and {`name:0`, `name:1`, ...} of names and sizes. The library keeps both, as to make
-- text of a number takes longer than all the rest of a field's name.
local DIGITS, NAMES = {}, {}
local function digits(i)
  local made = DIGITS[i]
  if not made then
    made = string.format('%d', i)
    DIGITS[i] = made
  end
  return made
end
local function names_by_sample(names, size)
  local kept = NAMES[names .. size]
  if not kept then
    kept = {}
    for name in string.gmatch(names, '%a+') do
      for i = 1, size do kept[#kept + 1] = name .. ':' .. digits(i - 1) end
    end
    NAMES[names .. size] = kept
  end
  return kept
end
-- Returns {value of the field `name:I`, or false} for the samples I = 0, 1, ... of a group. Behind those of the first
-- name follow those of the next one, where `names` has several.
local function by_sample(g, names, size) return call('HMGET', group_key(g), unpack(names_by_sample(names, size))) end
local function members(g, round, size)
  local all, beginning = {}, g .. ':' .. round .. ':'
  for i = 1, size do all[i] = beginning .. digits(i - 1) end
  return all
end

-- A blob's name is its key without the run's prefix. A name that begins with a number and a slash lies on another
-- shard of the cluster. Scripts cannot reach that shard, so they put the name on the garbage list, and the learner
-- frees the blob.
local function is_remote(name) return string.find(name, '^%d+/') end
local function free_blobs(names)
  local here = {}
  for _, name in ipairs(names) do
    if name then
      local beginning = string.sub(name, 1, 8)
      if beginning == 'payload:' or beginning == 'segment:' then
        here[#here + 1] = PUBLIC .. name
      elseif string.find(name, '^%d+/payload:') or string.find(name, '^%d+/segment:') then
        call('RPUSH', P .. 'garbage', name)
      end
    end
  end
  if #here > 0 then call('UNLINK', unpack(here)) end
end
local function free_blob(name) free_blobs({ name }) end
-- Takes the time to live off a blob. Returns false if the blob is gone, or has not `bytes` bytes.
local function keep_blob(name, bytes)
  if is_remote(name) then return true end
  local key = PUBLIC .. name
  if bytes and call('STRLEN', key) ~= bytes then return false end
  return call('PERSIST', key) == 1 or call('EXISTS', key) == 1
end

-- Adds a dead letter. `blamed` is the holder at fault, if any; only a digest is stored, as its session is secret.
local function to_dead_letters(tid, worker, reason, head, blamed)
  count('rejected')
  call('XADD', P .. 'dead', 'MAXLEN', '~', 1000, '*', 'tid', tid, 'worker', worker, 'reason', reason, 'head', head,
    'blamed', blamed and string.sub(redis.sha1hex(blamed), 1, 8) or '')
end

-- Returns true if a worker with this name but another session is alive.
local function is_of_another(worker, session) return (call('GET', P .. 'session:' .. worker) or session) ~= session end

-- A holder is `name session`, where `name` is the worker's name. Sessions are secret, so no worker can have another
-- one blamed for its samples. A process that uses the name of a living worker is the holder `name? session`.
local function name_of(holder) return string.match(holder or '', '^%S*') end
-- Counts a sample that cannot be what its holder said it was. After three strikes the holder gets no more leases.
local function strike(holder)
  if holder and call('HINCRBY', P .. 'strikes', holder, 1) >= 3 then call('SADD', P .. 'quarantined', holder) end
end

local function set_floor(g, floor, state)
  call('HSET', group_key(g), 'floor', floor)
  if state == 'open' then call('ZADD', OPEN, floor, g) end
end

-- Computes the floor of a group anew: the lowest weight step among its leases and its submissions in this round.
local function refloor(g)
  local size, state = fields(g, 'size', 'state')
  local floor
  for _, step in ipairs(by_sample(g, 'step', size)) do
    if step then floor = math.min(floor or tonumber(step), tonumber(step)) end
  end
  if floor then
    set_floor(g, floor, state)
  else
    call('HDEL', group_key(g), 'floor')
    call('ZREM', OPEN, g)
  end
  return floor
end

-- Returns name, bytes and tokens of a segment, the name of the worker that appended it, and what each step's weights
-- sampled of it: `STEP:TOKENS,...`.
local function parse_segment(entry) return string.match(entry, '^(%S+) (%d+) (%d+) ?(%S*) ?(%S*)$') end

-- How many segments of one sample are looked at. No honest sample has more, and more would hold up all other clients.
local MOST_SEGMENTS = 10000
-- Returns {name of a segment = bytes that its worker recorded for it} of a sample.
local function segment_bytes(m)
  local recorded = {}
  for _, entry in ipairs(call('LRANGE', segments_key(m), 0, MOST_SEGMENTS - 1)) do
    local name, bytes = parse_segment(entry)
    recorded[name] = tonumber(bytes)
  end
  return recorded
end

local MOST_ENTRIES = MOST_SEGMENTS
-- Returns the bytes that were recorded for a blob, or nil where no group holds it. `seen` keeps the segments of
-- samples for the next blob of the same call; a caller ends once `seen.entries` is above MOST_ENTRIES.
local function recorded_bytes(name, seen)
  local kind, m = string.match(name, '^%d*/?(%a+):(.+):[%w._-]+$')
  local g, _, i = parse(m or '')
  if not g then return end
  if kind == 'segment' then
    if not seen[m] then
      seen[m] = segment_bytes(m)
      seen.entries = (seen.entries or 0) + math.min(MOST_SEGMENTS, call('LLEN', segments_key(m)))
    end
    return seen[m][name]
  end
  local held, bytes = fields(g, 'payload:' .. i, 'bytes:' .. i)
  return held == name and tonumber(bytes) or nil
end

-- Frees the segments of sample i, which must have some. Returns how many tokens they had.
local function free_segments(g, m, i)
  local names, bytes, tokens = {}, 0, 0
  for _, entry in ipairs(call('LRANGE', segments_key(m), 0, -1)) do
    local name, b, t = parse_segment(entry)
    names[#names + 1] = name
    bytes, tokens = bytes + b, tokens + t
  end
  free_blobs(names)
  call('UNLINK', segments_key(m))
  call('HDEL', group_key(g), 'oldest:' .. i)
  if bytes > 0 then
    call('HINCRBY', group_key(g), 'bytes', -bytes)
    count('payload_bytes', -bytes)
  end
  return tokens
end

-- Frees the segments of sample i and counts their tokens as discarded: no worker can go on after them.
local function discard_segments(g, m, i)
  local tokens = free_segments(g, m, i)
  count('discarded_tokens', tokens)
  if tokens > 0 then tally('cut_by_response_length', length_class(tokens)) end
end

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
  local samples, tokens, parts = {}, {}, {}
  for _, had in ipairs(by_sample(g, 'tokens', size)) do
    local oldest
    for at = 1, #(had or ''), 12 do
      local _, step, n = struct.unpack('>I4I4I4', had, at)
      if not oldest or step < oldest then oldest = step end
      tokens[step] = (tokens[step] or 0) + n
    end
    if oldest then samples[oldest] = (samples[oldest] or 0) + 1 end
  end
  for step, n in pairs(tokens) do parts[#parts + 1] = string.format('%d:%d:%d', step, samples[step] or 0, n) end
  return table.concat(parts, ' ')
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
local function restart_sample(g, m, i, has_segments)
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
