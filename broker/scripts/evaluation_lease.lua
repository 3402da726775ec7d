-- include: lib_base lib_arguments lib_samples lib_groups lib_evaluations
-- evaluation_lease(version, count, ttl_s, nonce, holder, recipe | '', {sample, token}...)
--   -> {samples that are not done, or -1 where there is no evaluation of the version, {sample that the caller lost...},
--       {sample, token, prompt frame}...}
-- Leases samples of the evaluation of the version that the caller's engine holds, and renews those that it has. A
-- lease that is not renewed expires, and another worker may have the sample. Each worker that serves gets its share at
-- a time, so that several take part where there are several, and one that dies leaves others behind that can go on.
-- Samples that others have had for long are copied to a living worker that has room: no worker can keep them for
-- itself. Touches: evaluating:*, evaluation:*, begun:*; reads session:*, serving, quarantined, prompt:evaluation:*.
local version, wanted, ttl = text(1, 'version', 50), whole(2, 'count', 0, 1000), seconds(3, limit('lease_ttl_s', 3600))
local nonce, holder, is_alive = text(4, 'nonce', 64), evaluator(5)
local recipe = text(6, 'recipe', 64)
if not string.match(nonce, '^%w+$') then refuse('nonce') end
local key, queue, time = evaluation_key(version), evaluating_key(version), now()
local size, samples, done, keep = unpack(call('HMGET', key, 'size', 'samples', 'done', 'keep'))
if not size or call('SISMEMBER', P .. 'quarantined', holder) == 1 then return { -1, {} } end
if recipe ~= '' and recipe ~= meta('recipe') then return { size - done, {} } end -- it would draw them by other rules

local held, lost, has_fresh, count = {}, {}, false, 0
local function note(i)
  held[i] = true
  has_fresh = has_fresh or not is_begun(version, i, keep, 1)
end
for a = 7, #ARGV, 2 do
  local i, token = whole(a, 'sample', 0, size - 1), text(a + 1, 'token', 64)
  local is_left = call('ZSCORE', queue, i)
  if is_left and call('HGET', key, 'token:' .. i) == token then
    call('ZADD', queue, time + ttl, i)
    note(i)
  elseif is_left and token == copy_token(version, holder, i) and is_begun(version, i, keep, COPIED_AFTER) then
    note(i)
  else
    lost[#lost + 1] = i
  end
  if held[i] then count = count + 1 end
end

local reply, room = { size - done, lost }, math.ceil(size / math.max(1, call('SCARD', P .. 'serving'))) - count
room = math.min(wanted, room)
local function grant(i, token)
  note(i)
  reply[#reply + 1] = { i, token, call('GET', evaluation_prompt(version, math.floor(i / samples))) }
  room = room - 1
end
if room > 0 then
  for _, i in ipairs(call('ZRANGEBYSCORE', queue, '-inf', time, 'LIMIT', 0, room)) do
    call('ZADD', queue, time + ttl, i)
    call('ZADD', begun_key(version), 'NX', time, i)
    call('HSET', key, 'token:' .. i, nonce, 'by:' .. i, holder)
    grant(tonumber(i), nonce)
  end
end
if room > 0 and is_alive then
  local before = time - COPIED_AFTER * keep
  for _, i in ipairs(call('ZRANGEBYSCORE', begun_key(version), '-inf', before, 'LIMIT', 0, 1000)) do
    i = tonumber(i)
    if room > 0 and not held[i] then grant(i, copy_token(version, holder, i)) end
  end
end
if has_fresh then call('HSET', key, 'seen', time) end
return reply
