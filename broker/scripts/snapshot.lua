-- include: lib_base lib_workers
-- flags: no-writes allow-oom
-- snapshot() -> {meta, tally, {pool, retry, leases, ready, pinned groups}, {StepMetrics frame...}, {worker, frame...},
--   {worker that is quarantined...}, {{tid, worker, reason} of dead letters, newest first...}}
-- Reads: meta, tally, pool, retry, leases, ready, pinned, batch:*, steps, workers, worker:*, quarantined, dead.
local sizes, pinned = {}, 0
for i, queue in ipairs({ 'pool', 'retry', 'leases', 'ready' }) do sizes[i] = call('ZCARD', P .. queue) end
for _, step in ipairs(call('ZRANGE', P .. 'pinned', 0, -1)) do pinned = pinned + call('LLEN', P .. 'batch:' .. step) end
sizes[5] = pinned

-- Workers' users may not read it: reasons quote others' samples.
local function dead_letters()
  local entries, letters = redis.pcall('XREVRANGE', P .. 'dead', '+', '-', 'COUNT', 8), {}
  if entries.err then return letters end
  for n, entry in ipairs(entries) do
    local flat, found = entry[2], {}
    for a = 1, #flat, 2 do found[flat[a]] = flat[a + 1] end
    letters[n] = { found.tid, found.worker, found.reason }
  end
  return letters
end

-- Without their sessions, which nobody else is to know.
local quarantined = {}
for n, holder in ipairs(call('SMEMBERS', P .. 'quarantined')) do quarantined[n] = name_of(holder) end

return { call('HGETALL', META), call('HGETALL', P .. 'tally'), sizes, call('LRANGE', P .. 'steps', 0, -1),
  alive_workers(), quarantined, dead_letters() }
