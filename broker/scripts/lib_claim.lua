-- What a claim does to the run, and a re-assertion does once more where the server has lost the claim.

-- The archived weights are of the learner before.
local function forget_archive()
  for _, name in ipairs(call('SMEMBERS', P .. 'archive')) do call('UNLINK', PUBLIC .. name) end
  call('UNLINK', P .. 'archive')
  call('HDEL', META, 'archive_bytes')
end

-- Nothing that was trained after the checkpoint counts: it is fed and generated again.
local function forget(mark, step)
  call('UNLINK', SETTLED, DROPPED)
  call('HSET', META, 'watermark', mark, 'committed_step', step)
end

-- All that was sampled and not trained by the checkpoint.
local function generate_anew()
  for g in pairs(held_groups()) do
    local state = field(g, 'state')
    if state and state ~= 'pool' then requeue(g) end
  end
  call('UNLINK', PINNED)
end

-- The owner makes all weights up to these again, bit for bit: from the batches that it has `taken` since `step`, or from
-- its log, or, where no learner was without a server since (`is_same_server`), from those that are pinned: a server that
-- lost its last seconds may have pinned others in them. Weights above that an earlier incarnation has made the owner
-- makes otherwise, whether or not this server remembers that they were announced.
local function reproducible(step, replayable_to, is_rewound, taken, is_same_server)
  if is_rewound then return step end
  local reached = step
  local function is_pinned()
    if taken[reached] then return true end
    if not is_same_server then return false end
    local names = call('LRANGE', batch_key(reached), 0, -1)
    for _, g in ipairs(names) do if not is_whole(g) then return false end end
    return #names >= number('groups_per_step')
  end
  while is_pinned() do reached = reached + 1 end
  return math.max(reached, replayable_to)
end
