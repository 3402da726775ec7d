-- include: lib_base lib_workers lib_pools
-- flags: no-writes allow-oom
-- snapshot() -> {meta, tally, {pool, retry, leases, ready, pinned groups}, {StepMetrics frame...}, {worker, frame...},
--   {worker that is quarantined...}, {{tid, worker, reason} of dead letters, newest first...},
--   {samples refused in the last minute by a worker's fault, how many workers these came from},
--   {pool, frame, workers wanted...}}
-- Reads: meta, tally, pool, retry, leases, ready, pinned, batch:*, steps, workers, worker:*, quarantined, dead, pools,
--   pool:*, wanted.
local sizes, pinned = {}, 0
for i, queue in ipairs({ 'pool', 'retry', 'leases', 'ready' }) do sizes[i] = call('ZCARD', P .. queue) end
for _, step in ipairs(call('ZRANGE', P .. 'pinned', 0, -1)) do pinned = pinned + call('LLEN', P .. 'batch:' .. step) end
sizes[5] = pinned

-- Returns nothing to a worker's user: it may not read dead letters, whose reasons quote samples of other workers.
local function letters_since(start, most)
  local entries, letters = redis.pcall('XREVRANGE', P .. 'dead', '+', start, 'COUNT', most), {}
  if entries.err then return letters end
  for n, entry in ipairs(entries) do
    local flat, found = entry[2], {}
    for a = 1, #flat, 2 do found[flat[a]] = flat[a + 1] end
    letters[n] = found
  end
  return letters
end

local function dead_letters()
  local letters = letters_since('-', 8)
  for n, found in ipairs(letters) do letters[n] = { found.tid, found.worker, found.reason } end
  return letters
end

local function refused_lately()
  local samples, workers, seen = 0, 0, { [''] = true }
  for _, found in ipairs(letters_since(string.format('%.0f', 1000 * (now() - 60)), 1000)) do
    local blamed = found.blamed or ''
    if blamed ~= '' then samples = samples + 1 end
    if not seen[blamed] then seen[blamed], workers = true, workers + 1 end
  end
  return { samples, workers }
end

-- Names without sessions, which are secret.
local quarantined = {}
for n, holder in ipairs(call('SMEMBERS', P .. 'quarantined')) do quarantined[n] = name_of(holder) end

return { call('HGETALL', META), call('HGETALL', P .. 'tally'), sizes, call('LRANGE', P .. 'steps', 0, -1),
  alive_workers(), quarantined, dead_letters(), refused_lately(), alive_pools() }
