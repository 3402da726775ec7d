-- take(incarnation, owner, server, step, n) -> {'batch', {group, round, payload...}...} | {'wait', why} | {'exhausted'}
-- Pins n ready groups to the step, oldest weights first; asked again, the same step gives the same batch until committed.
-- Touches: meta, pool, retry, leases, open, ready, pinned, batch:*, settled, group:*, prompt:*, payload:*.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
free_first()
local step, n, lag = tonumber(ARGV[4]), tonumber(ARGV[5]), number('max_lag')
local BATCH, on_over_bound = batch_key(ARGV[4]), meta('on_over_bound')
local announced = announced_step() or -1

-- A group pinned by a re-asserting learner without its payloads cannot be delivered: generate it anew.
local function drop_undeliverable()
  for _, g in ipairs(call('LRANGE', BATCH, 0, -1)) do
    if tonumber(field(g, 'done') or '') ~= size_of(g) then requeue(g) end
  end
end

local function deliver()
  local reply = { 'batch' }
  for _, g in ipairs(call('LRANGE', BATCH, 0, -1)) do
    local one = { g, field(g, 'round') }
    for i = 0, size_of(g) - 1 do one[#one + 1] = field(g, 'payload:' .. i) end
    reply[#reply + 1] = one
  end
  return reply
end

local function send_back(g)
  if on_over_bound == 'drop' then
    settle(g)
    count('dropped')
  else
    requeue(g)
    count('requeued')
  end
end

-- No token older than the bound is trained; with `mask` a group stays while it has a younger one. Tokens newer than the
-- step that comes next belong to a branch that was abandoned (of those that are not, see fork).
local function sweep(queue)
  for _, g in ipairs(call('ZRANGE', queue, 0, -1)) do
    local floor, newest = tonumber(field(g, 'floor')), tonumber(field(g, 'newest') or '')
    local over = step - floor > lag
    if over and on_over_bound == 'mask' then over = queue == READY and step - newest > lag end
    if over then send_back(g)
    elseif newest and newest > step and announced <= step then requeue(g) count('requeued') end
  end
end

local function floors(queue)
  local flat, list = call('ZRANGE', queue, 0, -1, 'WITHSCORES'), {}
  for a = 1, #flat, 2 do list[#list + 1] = { group = flat[a], floor = tonumber(flat[a + 1]), open = queue == OPEN } end
  return list
end

-- Would pinning `need` ready groups now push an unfinished, older one over the bound? Counted by deadlines: the m-th
-- oldest of those left is trained `ceil(m / n)` steps from now at the earliest.
-- With `mask`, groups already over the bound go on, and nobody waits for them.
local function must_wait(ready, need)
  local open, rest = {}, {}
  for _, one in ipairs(floors(OPEN)) do if one.floor >= step - lag then open[#open + 1] = one end end
  if #open == 0 or open[1].floor >= ready[need].floor then return false end
  for a = need + 1, #ready do rest[#rest + 1] = ready[a] end
  for _, one in ipairs(open) do rest[#rest + 1] = one end
  table.sort(rest, function(a, b) if a.floor == b.floor then return a.open and not b.open end return a.floor < b.floor end)
  local has_open = false
  for m, one in ipairs(rest) do
    has_open = has_open or one.open
    if has_open and one.floor + lag < step + math.ceil(m / n) then return true end
  end
  return false
end

local function requeue_stragglers()
  for _, g in ipairs(call('ZRANGEBYSCORE', OPEN, step - lag, step - lag)) do
    requeue(g)
    count('requeued')
  end
end

local function pin(ready, need)
  for a = 1, need do
    local g = ready[a].group
    call('ZREM', READY, g)
    call('HSET', group_key(g), 'state', 'pinned', 'pin', step)
    call('RPUSH', BATCH, g)
  end
  call('ZADD', PINNED, step, step)
end

local function nothing_more_comes()
  if meta('feed_closed') ~= '1' then return false end
  return call('ZCARD', POOL) + call('ZCARD', RETRY) + call('ZCARD', LEASES) + call('ZCARD', OPEN) == 0
end

-- Over the cap on bytes, with nothing under way and nothing to commit.
local function nothing_can_free()
  return call('ZCARD', RETRY) + call('ZCARD', LEASES) + call('ZCARD', OPEN) + call('ZCARD', PINNED) == 0
end

drop_undeliverable()
local pinned = call('LLEN', BATCH)
local need = n - pinned
-- A replayed step is never topped up: whatever is generated now is younger than the weights that train it.
if need <= 0 or (pinned > 0 and step < announced) then return deliver() end
if step < announced then return { 'wait', 'rewind' } end

sweep(READY)
sweep(OPEN)
local ready = floors(READY)
if #ready < need then
  if not nothing_more_comes() then
    if number('payload_bytes') >= number('max_bytes') then
      local full = 'FULL ' .. number('payload_bytes') .. ' ' .. number('max_bytes')
      if nothing_can_free() then return redis.error_reply(full) end
      return { 'wait', 'bytes' }
    end
    -- a server that lost its last seconds, or a new one: workers need this learner's weights first
    if step > announced then return { 'wait', 'announce' } end
    return { 'wait', 'groups' }
  end
  if #ready == 0 and need == n then return { 'exhausted' } end
  need = #ready
end
if need > 0 and must_wait(ready, need) then
  if meta('on_straggler') == 'wait' then return { 'wait', 'stragglers' } end
  requeue_stragglers()
end
pin(ready, need)
return deliver()
