-- include: lib_base lib_arguments lib_samples lib_groups lib_evaluations
-- flags: allow-oom
-- report_death(session) -> how many leases were given back. The samples keep their segments.
-- The process with this session has ended without handing them back; its supervisor, which made the session, says so.
-- No other process knows it, so no process can take the leases of a worker that it did not start. A worker that lives
-- all the same, behind a cut network, is fenced like one whose leases have expired, and these count among those.
-- Its turn to swap weights ends, too. Looks at 10000 leases at most: the others expire.
-- Touches: retry, leases, open, group:*, evaluating:*, evaluation:*, turns, turns:*; reads session:*.
local session, MOST, n = text(1, 'session', 64), 10000, 0
if #session < 32 or not string.match(session, '^%x+$') then refuse('session') end
local function is_of(holder) return holder and string.sub(holder, -#session - 1) == ' ' .. session end

for _, m in ipairs(call('ZRANGE', LEASES, 0, MOST - 1)) do
  local g, _, i = parse(m)
  if is_of(field(g, 'by:' .. i)) then
    hand_back(m)
    n = n + 1
  end
end
if n > 0 then count('expired_leases', n) end
for _, version in ipairs(call('SMEMBERS', EVALUATIONS)) do
  local key, queue = evaluation_key(version), evaluating_key(version)
  for _, i in ipairs(call('ZRANGE', queue, 0, MOST - 1)) do
    if is_of(call('HGET', key, 'by:' .. i)) then
      call('ZADD', queue, 0, i)
      call('HDEL', key, 'token:' .. i, 'by:' .. i)
      n = n + 1
    end
  end
end
for _, kind in ipairs({ '', ':others' }) do
  for _, token in ipairs(call('ZRANGE', P .. 'turns' .. kind, 0, -1)) do
    local worker = string.match(token, '^(%w[%w._-]*):')
    if worker and call('GET', P .. 'session:' .. worker) == session then
      call('ZREM', P .. 'turns' .. kind, token)
      call('ZREM', P .. 'turns:begun' .. kind, token)
    end
  end
end
return n
