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

-- Returns ARGV[a], the name of a blob of member `m`, on any shard. The name contains its member, so no worker can name
-- the blob of another sample.
local function blob(a, kind, m, nonce)
  local name = text(a, kind, 500)
  local start = kind .. ':' .. m .. ':'
  local here = string.match(name, '^%d+/(.+)$') or name
  local rest = string.sub(here, #start + 1)
  if string.sub(here, 1, #start) ~= start or not string.match(rest, '^[%w._-]+$') or (nonce and rest ~= nonce) then
    refuse(kind)
  end
  return name
end

-- Returns how many tokens ARGV[a] names, a sample's tokens by the step of their weights: `STEP:TOKENS STEP:TOKENS...`.
local function tokens_by_step(a)
  local total = 0
  local rest = string.gsub(text(a, 'tokens', 20000) .. ' ', '(%d+):(%d+) ', function(step, n)
    if #step > 10 or #n > 10 then refuse('tokens') end
    total = total + n
    return ''
  end)
  if rest ~= '' or total > 2147483647 then refuse('tokens') end
  return total
end

-- Checks ARGV[a] to ARGV[last]: the oldest step, then {incarnation, its newest step}...
local function versions(a, last)
  if last > #ARGV or last - a < 2 or (last - a) % 2 == 1 then refuse('versions') end
  for b = a, last do whole(b, 'versions', 0, 2147483647) end
end

-- Returns ARGV[a], which goes into a dead letter, cut to `most` bytes.
local function quoted(a, most) return string.sub(ARGV[a] or '', 1, most) end
