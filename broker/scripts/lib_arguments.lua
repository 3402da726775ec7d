-- What workers say, checked before anything is written: their programs need not be ours.

local function refuse(what) error({ err = 'ARGUMENT ' .. what }) end

-- ARGV[a], where it is a whole number within bounds.
local function whole(a, what, least, most)
  local text = ARGV[a] or ''
  local n = #text < 16 and string.match(text, '^%-?%d+$') and tonumber(text)
  if not n or n < least or n > most then refuse(what) end
  return n
end

-- ARGV[a], where it is a time above 0; at most so many.
local function seconds(a, most)
  local text = ARGV[a] or ''
  local n = #text < 32 and string.match(text, '^%d+%.?%d*e?%-?%d*$') and tonumber(text)
  if not n or n < 0 then refuse('seconds') end
  return math.min(n, most)
end

-- ARGV[a], of at most so many bytes.
local function text(a, what, most)
  local value = ARGV[a]
  if not value or #value > most then refuse(what) end
  return value
end

-- ARGV[a], which names a worker as `keys.is_name` has it.
local function worker_name(a)
  if not string.match(text(a, 'worker', 100), '^%w[%w._-]*$') then refuse('worker') end
  return ARGV[a]
end

-- A rule of the run that bounds what a worker may ask for.
local function limit(rule, otherwise) return tonumber(meta(rule) or '') or otherwise end

-- The parts of ARGV[a], a member.
local function sample(a)
  local g, round, i = parse(text(a, 'sample', 300))
  if not g then refuse('sample') end
  return g, round, i
end

-- ARGV[a], the name of a blob of this member, on whichever shard; nobody can name another's.
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

-- ARGV[a] to ARGV[last]: the oldest step, then {incarnation, its newest step}...
local function versions(a, last)
  if last > #ARGV or last - a < 2 or (last - a) % 2 == 1 then refuse('versions') end
  for b = a, last do whole(b, 'versions', 0, 2147483647) end
end

-- What a worker quotes, cut to what a dead letter holds.
local function quoted(a, most) return string.sub(ARGV[a] or '', 1, most) end
