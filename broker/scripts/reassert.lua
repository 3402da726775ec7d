-- include: lib_base lib_samples lib_groups lib_claim
-- flags: allow-oom
-- reassert(incarnation, owner, announced incarnation | '', announced step, watermark, committed step, config,
--          replayable to, is rewound, regenerate, n rules, {rule, value} * n, n forks, {incarnation, step} * n,
--          n settled, group * n, {step, group, round, size}...) -> server id
-- Restores all that the learner knows of the run on a server that has restarted, perhaps without its last second.
-- Touches: meta, identity, owner, verbs, config, pool, open, ready, pinned, batch:*, settled, group:*, payload:*,
-- forks.
local owner = redis.sha1hex(ARGV[2])
local is_ours = call('GET', PUBLIC .. 'owner') == owner and meta('incarnation') == ARGV[1]
if not is_ours and number('incarnation') >= tonumber(ARGV[1]) then
  return redis.error_reply('FENCED ' .. number('incarnation'))
end
call('SET', PUBLIC .. 'verbs', VERBS)
if not is_ours then
  call('HSET', META, 'incarnation', ARGV[1], 'state', 'training', 'feed_closed', 0)
  call('SET', PUBLIC .. 'owner', owner)
  call('SET', PUBLIC .. 'identity', IDENTITY)
  call('HSETNX', META, 'started', now())
  store_config(ARGV[7])
end

local mark, step, is_rewound, is_anew = ARGV[5], tonumber(ARGV[6]), ARGV[9] == '1', ARGV[10] == '1'
local a = 11
local function next_list(width)
  local list, stop = {}, a + tonumber(ARGV[a]) * width
  for b = a + 1, stop do list[#list + 1] = ARGV[b] end
  a = stop + 1
  return list
end
local rules = next_list(2)
for b = 1, #rules, 2 do call('HSET', META, rules[b], rules[b + 1]) end
local forks = next_list(2)
local first_settled = a + 1
next_list(1)
local first_pinned = a

if not is_ours then -- the server has lost the claim, so its state is older than that
  if is_rewound then forget(mark, step) end
  if is_anew then generate_anew() end
end
commit_below(step)
settle_contained(mark, first_settled, first_pinned - 1)

local function at_least(name, incarnation, step)
  local held_incarnation, held_step = number(name .. '_incarnation'), tonumber(meta(name .. '_step') or '') or -1
  if incarnation < held_incarnation or (incarnation == held_incarnation and step <= held_step) then return end
  -- The server has lost a rewind. The rewind may have gone to a lower step than this, but the steps between were made
  -- within the second that was lost.
  if name == 'announced' and step < held_step then fork(incarnation, step) end
  call('HSET', META, name .. '_incarnation', incarnation, name .. '_step', step, name .. '_by', owner)
  raise_highest(step)
end
if ARGV[3] ~= '' then
  for _, name in ipairs({ 'announced', 'offered' }) do at_least(name, tonumber(ARGV[3]), tonumber(ARGV[4])) end
end
local function has_payloads(g, round)
  if field(g, 'round') ~= round or not is_whole(g) then return false end
  for i = 0, size_of(g) - 1 do
    local payload = field(g, 'payload:' .. i)
    if payload and not keep_blob(payload) then return false end
  end
  return true
end

-- Pins a group that the learner has trained and not yet committed, so that no worker generates it now, whatever state
-- the server has it in.
local function pin_again(step, g, round, size)
  if is_settled(g) then return end
  local state = field(g, 'state')
  if not state or state == 'pool' then
    count('admitted')
    call('ZREM', POOL, g)
    call('HSET', group_key(g), 'size', size, 'index', number('admitted') - number('dropped') - 1)
  elseif has_payloads(g, round) then
    local old = field(g, 'pin')
    if old then call('LREM', batch_key(old), 0, g) end
  else
    clear_round(g)
  end
  call('ZREM', READY, g)
  call('SREM', LOST, g)
  call('HSET', group_key(g), 'round', round, 'state', 'pinned', 'pin', step)
  call('RPUSH', batch_key(step), g)
  call('ZADD', PINNED, step, step)
end
local taken = {} -- step -> {group of its batch = true}
for b = first_pinned, #ARGV, 4 do
  local taken_step = tonumber(ARGV[b])
  taken[taken_step] = taken[taken_step] or {}
  taken[taken_step][ARGV[b + 1]] = true
end
if tonumber(ARGV[1]) > 1 then
  -- A server that remembers the claim may have lost that this learner has since given up reproducing a step.
  local forked = is_ours and tonumber(call('HGET', FORKS, ARGV[1]) or '')
    or reproducible(step, tonumber(ARGV[8]), is_rewound, taken, false)
  local known = forked
  for b = 1, #forks, 2 do
    if forks[b] == ARGV[1] then known = math.min(known, tonumber(forks[b + 1]))
    elseif not is_ours then call('HSETNX', FORKS, forks[b], forks[b + 1]) end
  end
  if not is_ours or known < forked then fork(ARGV[1], known) end
end
-- The server may remember groups that have left a batch since.
for taken_step, groups in pairs(taken) do
  for _, g in ipairs(call('LRANGE', batch_key(taken_step), 0, -1)) do if not groups[g] then unpin(g) end end
end
for b = first_pinned, #ARGV, 4 do pin_again(ARGV[b], ARGV[b + 1], ARGV[b + 2], ARGV[b + 3]) end

call('HSET', META, 'adopted', server_id())
renumber(step)
return server_id()
