-- The effects of a claim on the run. A re-assertion has them once more where the server has lost the claim.

-- Stores the resolved recipe, and the digest by which workers tell which one they obey.
local function store_config(config)
  call('SET', PUBLIC .. 'config', config)
  call('HSET', META, 'recipe', redis.sha1hex(config))
end

-- Frees the archived weights, which are those of the previous learner.
local function forget_archive()
  for _, name in ipairs(call('SMEMBERS', P .. 'archive')) do call('UNLINK', PUBLIC .. name) end
  call('UNLINK', P .. 'archive')
  call('HDEL', META, 'archive_bytes')
end

-- Forgets all that was trained after the checkpoint: those groups are fed and generated again.
local function forget(mark, step)
  call('UNLINK', SETTLED, DROPPED, GIVEN_UP)
  call('HSET', META, 'watermark', mark, 'committed_step', step)
end

-- Sends back all groups that were sampled and are not in the checkpoint.
local function generate_anew()
  for g in pairs(held_groups()) do
    local state = field(g, 'state')
    if state and state ~= 'pool' then requeue(g) end
  end
  call('UNLINK', PINNED)
end

-- Returns the last step whose weights the owner makes again, bit for bit, from the checkpoint of `step`. It trains the
-- batches that it has `taken` since, those of its log (up to `replayable_to`), or those that are pinned. Pinned
-- batches count only where no learner has lost its server since (`is_same_server`): a server that lost its last
-- seconds may have pinned other ones in them. Later weights the owner makes from other batches than an earlier
-- incarnation did, whether or not this server remembers that they were announced.
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
