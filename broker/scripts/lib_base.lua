-- Shared by all scripts: keys, counters, fields, blobs. A script begins with `-- include: FILE...` and may use what
-- those files define. broker/connection/function_library.py makes each script a function of the run's library, which begins with
-- three prefixes of keys (see broker/keys.py): P of keys that only scripts write, PUBLIC of keys that clients write,
-- too, and PROMPT of prompts. The shared files follow once, for all functions; lib_call sets what changes from call to
-- call. Scripts see only the names of payloads and segments, never their bytes.
local META = P .. 'meta'
local RETRY, LEASES, OPEN, READY = P .. 'retry', P .. 'leases', P .. 'open', P .. 'ready'
local REFUSED = P .. 'refused'
-- How many weight versions displays show, the newest ones.
local SHOWN_VERSIONS = 32

local function now()
  if not clock then
    local t = call('TIME')
    clock = t[1] + t[2] / 1e6
  end
  return clock
end
local function meta(field) return call('HGET', META, field) end
local function number(field) return tonumber(meta(field) or '') or 0 end
-- Returns true if the learner has refused a sample whose group is not settled yet.
local function is_any_refused()
  if has_refused == nil then has_refused = call('EXISTS', REFUSED) == 1 end
  return has_refused
end
-- Both add to counters, and never of a run that is not there: a deleted run would come back with them.
local function is_run()
  if is_there == nil then is_there = call('EXISTS', META) == 1 end
  return is_there
end
local function count(field, n) if is_run() then call('HINCRBY', META, field, n or 1) end end
local function tally(what, key, n) if is_run() then call('HINCRBY', P .. 'tally', what .. ':' .. key, n or 1) end end
-- Returns the smallest power of two that is at least n: tallies count lengths by it.
local function length_class(n)
  local length = 1
  while length < n do length = 2 * length end
  return length
end
-- Returns the id of the server's process. The library keeps it, and its memory lasts as long as that process.
local function server_id()
  SERVER = SERVER or string.match(call('INFO', 'server'), 'run_id:(%x+)')
  return SERVER
end

local function group_key(g) return P .. 'group:' .. g end
local function member(g, round, i) return g .. ':' .. round .. ':' .. i end
local function parse(m) return string.match(m, '^(.+):(%d+):(%d+)$') end
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
local function said_of_segments(m)
  local said = {}
  for _, entry in ipairs(call('LRANGE', segments_key(m), 0, MOST_SEGMENTS - 1)) do
    local name, bytes = parse_segment(entry)
    said[name] = tonumber(bytes)
  end
  return said
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
      seen[m] = said_of_segments(m)
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
