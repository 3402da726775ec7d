-- lease(incarnation, step, count, ttl_s, nonce, 'member token' held...) -> {server id, state, reason, {member, token}...}
-- Expired leases first, then retries (oldest index first), then new groups as far as admission allows.
-- Touches: meta, pool, retry, leases, open, group:*.
local incarnation, step, wanted, ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local reply = { server_id(), meta('state') or 'absent', '' }
local given, time, held = 0, now(), {}
for a = 6, #ARGV do held[ARGV[a]] = true end

local function refuse(reason) reply[3] = reason return reply end

if reply[2] == 'finished' then return refuse('finished') end
local announced, lag = announced_step(), number('max_lag')
if not announced or reply[2] == 'stopped' or incarnation > number('incarnation') then
  return refuse('paused')
end
-- Weights of an abandoned branch, or too old for the step that comes next: nothing begun with them could be trained.
local is_older = incarnation < number('announced_incarnation')
if step + lag < announced or (is_older and step > announced) or is_abandoned(incarnation, step) then
  return refuse('stale weights')
end

local groups_per_step = number('groups_per_step')
local function may(index) return math.floor(index / groups_per_step) <= step + lag end

local function hand(m)
  local g, _, i = parse(m)
  given = given + 1
  local token = ARGV[5] .. '.' .. given
  local had = field(g, 'step:' .. i)
  call('HSET', group_key(g), 'token:' .. i, token, 'step:' .. i, step)
  call('ZADD', LEASES, time + ttl, m)
  call('ZREM', RETRY, m)
  local floor = tonumber(field(g, 'floor') or '')
  if had or not floor or step < floor then refloor(g) end
  reply[#reply + 1] = m
  reply[#reply + 1] = token
end

local function hand_expired()
  for _, m in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', time, 'LIMIT', 0, 1000)) do
    if given == wanted then return end
    local g, _, i = parse(m)
    -- The caller may be generating it still: it renews what it holds, and never gets the same sample twice.
    if not held[m .. ' ' .. (field(g, 'token:' .. i) or '')] and may(tonumber(field(g, 'index'))) then
      hand(m)
      count('expired_leases')
    end
  end
end

local function hand_retries()
  local queue = call('ZRANGE', RETRY, 0, wanted - given - 1, 'WITHSCORES')
  for a = 1, #queue, 2 do
    if not may(tonumber(queue[a + 1])) then return 'stale weights' end
    hand(queue[a])
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
  call('HSET', group_key(g), 'index', index, 'state', 'open')
  enqueue(g)
end

hand_expired()
while given < wanted do
  local reason = hand_retries()
  if not reason and given < wanted then reason = admit() end
  if reason then return refuse(reason) end
end
return reply
