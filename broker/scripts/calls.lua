-- What every call begins with: its state, the run's counters, the checks of its arguments, and who may make it.
--
-- The files of this folder, one after the other in the order of broker/connection/function_library.py, are the run's
-- library of functions. It begins with three prefixes of keys (see broker/keys.py): P of keys that only scripts write,
-- PUBLIC of keys that clients write, too, and PROMPT of prompts. Scripts see only the names of payloads and segments,
-- never their bytes.
local call, KEYS, ARGV, IDENTITY, is_there, forks, highest, clock, has_refused, risen, SERVER

-- Resets what the files keep during one call. KEYS[1] ends with `of:IDENTITY`, the identity of the run to which the
-- caller belongs. A caller of a run that was deleted or overwritten must not reach the run that has its name now. The
-- identity is also the first key that is read: while a cluster moves the run to another node, a call fails here, before
-- it has written anything.
local function begin(keys, arguments)
  call, KEYS, ARGV, is_there, forks, highest = redis.call, keys, arguments, nil, nil, nil
  clock, has_refused, risen = nil, nil, nil
  IDENTITY = string.match(KEYS[1], ':of:(%x*)$')
  local held_identity = call('GET', PUBLIC .. 'identity')
  if held_identity and held_identity ~= IDENTITY then return redis.error_reply('FOREIGN ' .. held_identity) end
end

-- Registers a function. Flags: `no-writes`: users that may only read may call it; `allow-oom`: a server without memory
-- carries it out.
local function register(name, flags, body)
  redis.register_function{ function_name = LIBRARY .. name, flags = flags, callback = body }
end
local function verb(name, flags, body)
  register(name, flags, function(keys, arguments) return begin(keys, arguments) or body() end)
end

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

-- Returns nil, or the error that a verb must return: RESTARTED where the server is another one than the caller knew,
-- FENCED where the caller does not own the run any more.
local function fence(incarnation, token, server)
  if server and server ~= '' and server ~= server_id() then return redis.error_reply('RESTARTED ' .. server_id()) end
  local held = meta('incarnation')
  if held ~= incarnation or call('GET', PUBLIC .. 'owner') ~= redis.sha1hex(token) then
    return redis.error_reply('FENCED ' .. (held or 'nobody'))
  end
end
-- Registers a verb of the run's owner, whose first arguments are its incarnation, its token and its server.
local function owner_verb(name, flags, body)
  verb(name, flags, function() return fence(ARGV[1], ARGV[2], ARGV[3]) or body() end)
end

-- Checks of the arguments of verbs that workers call, before anything is written: any program may hold a worker's
-- password, so no argument is trusted. Each function raises the error ARGUMENT for a value out of bounds.
local function refuse(what) error({ err = 'ARGUMENT ' .. what }) end

-- Returns ARGV[a] as a whole number from `least` to `most`.
local function whole(a, what, least, most)
  local text = ARGV[a] or ''
  local n = #text < 16 and string.match(text, '^%-?%d+$') and tonumber(text)
  if not n or n < least or n > most then refuse(what) end
  return n
end

-- Returns ARGV[a] as a time in seconds, which is not negative, cut to `most`.
local function seconds(a, most)
  local text = ARGV[a] or ''
  local n = #text < 32 and string.match(text, '^%d+%.?%d*e?%-?%d*$') and tonumber(text)
  if not n or n < 0 then refuse('seconds') end
  return math.min(n, most)
end

-- Returns ARGV[a], a text of at most `most` bytes.
local function text(a, what, most)
  local value = ARGV[a]
  if not value or #value > most then refuse(what) end
  return value
end

-- Returns ARGV[a], the name of a worker: the same rule as `is_name` in broker/keys.py.
local function worker_name(a)
  if not string.match(text(a, 'worker', 100), '^%w[%w._-]*$') then refuse('worker') end
  return ARGV[a]
end

-- Returns a rule of the run that bounds what a worker may ask for, or `otherwise` where the run has none.
local function limit(rule, otherwise) return tonumber(meta(rule) or '') or otherwise end

-- Returns group, round and sample number of a member (GROUP:ROUND:SAMPLE); of ARGV[a] in `sample`.
local function parse(m) return string.match(m, '^(.+):(%d+):(%d+)$') end
local function sample(a)
  local g, round, i = parse(text(a, 'sample', 300))
  if not g then refuse('sample') end
  return g, round, i
end

-- Returns ARGV[a], the name of a segment of member `m`, on any shard. The name contains its member, so no worker can
-- name the blob of another sample.
local function segment_of(a, m)
  local name = text(a, 'segment', 500)
  local start, here = 'segment:' .. m .. ':', string.match(name, '^%d+/(.+)$') or name
  local rest = string.sub(here, #start + 1)
  if string.sub(here, 1, #start) ~= start or not string.match(rest, '^[%w._-]+$') then refuse('segment') end
  return name
end

-- Returns what ARGV[a] says of a blob: its bytes, its tokens, the step of the oldest, and {incarnation, step}... of the
-- versions that sampled them. It is packed: bytes, then {incarnation, step, tokens}..., big-endian integers of 32 bits
-- below 2^31. One argument that is read at once costs a fraction of what as many arguments in digits cost.
local function measures(a)
  local packed, versions, MOST = text(a, 'measures', 20000), {}, 2147483647
  if #packed < 16 or #packed % 12 ~= 4 then refuse('measures') end
  local bytes, tokens, oldest, newest = (struct.unpack('>I4', packed)), 0, MOST, 0
  for at = 5, #packed, 12 do
    local n, incarnation, step, sampled = #versions, struct.unpack('>I4I4I4', packed, at)
    versions[n + 1], versions[n + 2] = incarnation, step
    tokens = tokens + sampled
    if step < oldest then oldest = step end
    newest = math.max(newest, incarnation, step)
  end
  if bytes < 1 or math.max(bytes, tokens, newest) > MOST then refuse('measures') end
  return bytes, tokens, oldest, versions
end

-- Returns ARGV[a], which goes into a dead letter, cut to `most` bytes.
local function quoted(a, most) return string.sub(ARGV[a] or '', 1, most) end
