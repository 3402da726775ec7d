-- include: lib_base lib_arguments lib_samples lib_groups lib_evaluations
-- evaluation_lease(version, count, ttl_s, nonce, holder, {sample, token}...)
--   -> {samples that are not done, or -1 where there is no evaluation of the version, {sample that the caller lost...},
--       {sample, token, prompt frame}...}
-- Leases samples of the evaluation of the version that the caller's engine holds, and renews those that it has. A
-- lease that is not renewed expires, and another worker may have the sample. Each worker that serves gets its share at
-- a time, so that several take part where there are several, and one that dies leaves others behind that can go on.
-- Touches: evaluating:*, evaluation:*; reads session:*, serving, quarantined, prompt:evaluation:*.
local version, wanted, ttl = text(1, 'version', 50), whole(2, 'count', 0, 1000), seconds(3, limit('lease_ttl_s', 3600))
local nonce, holder = text(4, 'nonce', 64), text(5, 'holder', 200)
if not string.match(nonce, '^%w+$') then refuse('nonce') end
local worker, session = string.match(holder, '^(%w[%w._-]*) (%w+)$')
if not worker then refuse('holder') end
if is_of_another(worker, session) then holder = worker .. '? ' .. session end
local key, queue, time = evaluation_key(version), evaluating_key(version), now()
local size, samples, done = unpack(call('HMGET', key, 'size', 'samples', 'done'))
if not size or call('SISMEMBER', P .. 'quarantined', holder) == 1 then return { -1, {} } end
call('HSET', key, 'seen', time)

local held, lost = 0, {}
for a = 6, #ARGV, 2 do
  local i = whole(a, 'sample', 0, size - 1)
  if call('HGET', key, 'token:' .. i) == text(a + 1, 'token', 64) and call('ZSCORE', queue, i) then
    call('ZADD', queue, time + ttl, i)
    held = held + 1
  else
    lost[#lost + 1] = i
  end
end

local share = math.ceil(size / math.max(1, call('SCARD', P .. 'serving')))
local reply = { size - done, lost }
wanted = math.min(wanted, share - held)
if wanted > 0 then
  for _, i in ipairs(call('ZRANGEBYSCORE', queue, '-inf', time, 'LIMIT', 0, wanted)) do
    call('ZADD', queue, time + ttl, i)
    call('HSET', key, 'token:' .. i, nonce)
    reply[#reply + 1] = { tonumber(i), nonce, call('GET', evaluation_prompt(version, math.floor(i / samples))) }
  end
end
return reply
