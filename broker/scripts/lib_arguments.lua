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

-- Returns group, round and sample number of ARGV[a], a member (GROUP:ROUND:SAMPLE).
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
