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
