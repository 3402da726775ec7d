-- What all scripts share: keys, counters, fields, blobs. Scripts begin with `-- include: FILE...` and see what those define.
-- broker/connection/verbs.py makes each script a function of the run's library, which begins with three prefixes of keys (see
-- broker/keys.py): P of those that only scripts write, PUBLIC of those that clients name, too, and PROMPT of prompts. Then
-- come these files, once for all functions, so what changes from call to call is set by lib_call. Payloads and segments
-- never pass through here: scripts see only their names.
local META = P .. 'meta'
local RETRY, LEASES, OPEN, READY = P .. 'retry', P .. 'leases', P .. 'open', P .. 'ready'

local function now() local t = call('TIME') return t[1] + t[2] / 1e6 end
local function meta(field) return call('HGET', META, field) end
local function number(field) return tonumber(meta(field) or '') or 0 end
-- Counters never bring back the meta hash of a run that was deleted.
local function count(field, n)
  if is_there == nil then is_there = call('EXISTS', META) == 1 end
  if is_there then call('HINCRBY', META, field, n or 1) end
end
local function tally(what, key, n) call('HINCRBY', P .. 'tally', what .. ':' .. key, n or 1) end
-- It stays the same as long as the process, and so the library in its memory, does.
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
-- {value of `name:I` or false} for the samples I = 0, 1, ... of a group.
local function by_sample(g, name, size)
  local names = {}
  for i = 1, size do names[i] = name .. ':' .. (i - 1) end
  return call('HMGET', group_key(g), unpack(names))
end
local function members(g, round, size)
  local all = {}
  for i = 1, size do all[i] = member(g, round, i - 1) end
  return all
end

-- A blob is named by its key below the run's prefix. One that begins with a number and a slash lies on another shard of
-- a cluster, where only clients reach: it goes through the garbage list.
local function is_blob(name) return string.find(name, '^%d*/?payload:') or string.find(name, '^%d*/?segment:') end
local function is_remote(name) return string.find(name, '^%d+/') end
local function free_blobs(names)
  local here = {}
  for _, name in ipairs(names) do
    if name and is_blob(name) then -- names come from workers
      if is_remote(name) then call('RPUSH', P .. 'garbage', name) else here[#here + 1] = PUBLIC .. name end
    end
  end
  if #here > 0 then call('UNLINK', unpack(here)) end
end
local function free_blob(name) free_blobs({ name }) end
-- Takes the time to live off a blob; false if it is gone, or not of so many bytes.
local function keep_blob(name, bytes)
  if bytes and not is_remote(name) and call('STRLEN', PUBLIC .. name) ~= tonumber(bytes) then return false end
  return is_remote(name) or call('PERSIST', PUBLIC .. name) == 1 or call('EXISTS', PUBLIC .. name) == 1
end

-- `blamed`: the holder whose fault it is, told apart by a digest, as sessions are secret.
local function to_dead_letters(tid, worker, reason, head, blamed)
  count('rejected')
  call('XADD', P .. 'dead', 'MAXLEN', '~', 1000, '*', 'tid', tid, 'worker', worker, 'reason', reason, 'head', head,
    'blamed', blamed and string.sub(redis.sha1hex(blamed), 1, 8) or '')
end

-- Does the name belong to a process that is not this session's?
local function is_of_another(worker, session) return (call('GET', P .. 'session:' .. worker) or session) ~= session end

-- A sample of this holder could not be what it was said to be. Three of them, and it gets no more leases. A holder is
-- `name session`: sessions are secret, so that nobody is blamed for another's samples. `name? session` is one that uses
-- another's name.
local function name_of(holder) return string.match(holder or '', '^%S*') end
local function strike(holder)
  if holder and call('HINCRBY', P .. 'strikes', holder, 1) >= 3 then call('SADD', P .. 'quarantined', holder) end
end

local function set_floor(g, floor, state)
  call('HSET', group_key(g), 'floor', floor)
  if state == 'open' then call('ZADD', OPEN, floor, g) end
end

-- The floor of a group, anew: the lowest weight step among its leases and its submissions in this round.
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

-- Its name, bytes and tokens, and the name of the worker that appended it.
local function parse_segment(entry) return string.match(entry, '^(%S+) (%d+) (%d+) ?(%S*)$') end

-- {bytes that each segment of a sample was said to have, by name}; more than so many no sample has, and what stands behind
-- them is not looked for, as that would hold up everybody else.
local MOST_SEGMENTS = 10000
local function said_of_segments(m)
  local said = {}
  for _, entry in ipairs(call('LRANGE', segments_key(m), 0, MOST_SEGMENTS - 1)) do
    local name, bytes = parse_segment(entry)
    said[name] = tonumber(bytes)
  end
  return said
end

local MOST_ENTRIES = MOST_SEGMENTS
-- How many bytes a blob was said to have when it was recorded; nil where no group holds it. `seen` keeps the segments of
-- samples for the next blob of the same call;
-- once `seen.entries` of them were looked at, the call had better end.
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

-- Frees the segments of sample i, which has some; how many tokens they had.
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

-- The same for segments that nobody can use any more.
local function discard_segments(g, m, i) count('discarded_tokens', free_segments(g, m, i)) end
