-- Returns {name, heartbeat frame...} of all workers whose last heartbeat has not expired, sorted by name.
local function alive_workers()
  local names, alive = call('SMEMBERS', P .. 'workers'), {}
  table.sort(names)
  for _, name in ipairs(names) do
    local frame = call('GET', P .. 'worker:' .. name)
    if frame then
      alive[#alive + 1] = name
      alive[#alive + 1] = frame
    end
  end
  return alive
end

-- The pools whose supervisors were heard of lately: {name, frame, workers wanted...}, by name.
local function alive_pools()
  local names, wanted, flat, alive = call('SMEMBERS', P .. 'pools'), {}, call('HGETALL', P .. 'wanted'), {}
  for a = 1, #flat, 2 do wanted[flat[a]] = tonumber(flat[a + 1]) end
  table.sort(names)
  for _, name in ipairs(names) do
    local frame = call('GET', P .. 'pool:' .. name)
    if frame then
      alive[#alive + 1] = name
      alive[#alive + 1] = frame
      alive[#alive + 1] = wanted[name] or 0
    end
  end
  return alive
end
