-- lease(incarnation, step, count, ttl_s, nonce, 'member token' held...) -> {state, reason, {member, token, segment...}...}
-- Admitted samples without a lease (expired, handed back, never begun) in the order of their deadlines, then new groups as
-- far as admission allows. Touches: meta, tally, pool, retry, leases, open, group:*, segments:*.
local incarnation, step, wanted, ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local reply = { meta('state') or 'absent', '' }
local given, time, held = 0, now(), {}
for a = 6, #ARGV do held[ARGV[a]] = true end
local n_held = #ARGV - 5

local function refuse(reason) reply[2] = reason return reply end

if reply[1] == 'finished' then return refuse('finished') end
local announced, lag = announced_step(), number('max_lag')
if not announced or reply[1] == 'stopped' or incarnation > number('incarnation') then return refuse('paused') end
-- Weights of an abandoned branch, or too old for the step that comes next: nothing begun with them could be trained.
local is_older = incarnation < number('announced_incarnation')
if step + lag < announced or (is_older and step > announced) or is_abandoned(incarnation, step) then
  return refuse('stale weights')
end
local limit = number('max_leases_per_worker')
if limit > 0 then wanted = math.min(wanted, limit - n_held) end
if wanted <= 0 then return refuse('worker limit') end

local groups_per_step = number('groups_per_step')
local function may(index) return math.floor(index / groups_per_step) <= step + lag end

-- The names of what is kept of sample i, to go on after. Too old to be trained, it is thrown away.
local function usable_segments(g, m, i)
  local oldest, names = tonumber(field(g, 'oldest:' .. i) or ''), {}
  if not oldest then return names end
  if announced - oldest > lag and meta('on_over_bound') ~= 'mask' then discard_segments(g, m, i) return names end
  for _, entry in ipairs(call('LRANGE', segments_key(m), 0, -1)) do
    local name, _, tokens = parse_segment(entry)
    names[#names + 1] = name
    count('resumed_tokens', tokens)
  end
  return names, oldest
end

local function hand(m)
  local g, _, i = parse(m)
  given = given + 1
  local token, had = ARGV[5] .. '.' .. given, field(g, 'step:' .. i)
  local names, oldest = usable_segments(g, m, i)
  local from = math.min(step, oldest or step)
  call('HSET', group_key(g), 'token:' .. i, token, 'step:' .. i, from)
  call('ZADD', LEASES, time + ttl, m)
  call('ZREM', RETRY, m)
  local floor = tonumber(field(g, 'floor') or '')
  if had or not floor or from < floor then refloor(g) end
  reply[#reply + 1] = { m, token, unpack(names) }
end

-- An expired lease is anybody's, yet stays its holder's until somebody takes it.
local function collect_expired()
  for _, m in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', time, 'LIMIT', 0, 1000)) do
    call('ZREM', LEASES, m)
    call('ZADD', RETRY, field((parse(m)), 'index'), m)
    count('expired_leases')
  end
end

local function hand_retries()
  local queue = call('ZRANGE', RETRY, 0, wanted - given - 1 + n_held, 'WITHSCORES')
  for a = 1, #queue, 2 do
    if given == wanted then return end
    local m = queue[a]
    local g, _, i = parse(m)
    if not may(tonumber(queue[a + 1])) then return 'stale weights' end
    -- The caller may be generating it still: it renews what it holds, and never gets the same sample twice.
    if not held[m .. ' ' .. (field(g, 'token:' .. i) or '')] then hand(m) end
  end
end

-- nil, or why no new group may be begun now.
local function admit()
  local index = number('admitted') - number('dropped')
  if call('ZCARD', POOL) == 0 then return 'no prompts' end
  if math.floor(index / groups_per_step) > announced + lag then return 'capacity' end
  if not may(index) then return 'stale weights' end
  if number('payload_bytes') >= number('max_bytes') then return 'bytes' end
  local g = call('ZPOPMIN', POOL)[1]
  count('admitted')
  tally('dispatched_by_prompt_length', field(g, 'length'))
  call('HSET', group_key(g), 'index', index, 'state', 'open')
  enqueue(g)
end

local function hand_all()
  while given < wanted do
    local reason = hand_retries()
    if not reason and given < wanted then reason = admit() end
    if reason then return refuse(reason) end
  end
end

collect_expired()
hand_all()
if given > 0 then tally('dispatched_by_lag', math.max(0, announced - step), given) end
return reply
