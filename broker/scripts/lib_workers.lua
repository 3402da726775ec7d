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
