-- include: lib_base lib_arguments lib_scoring
-- flags: allow-oom
-- score_lease(scorer's name, ttl_s, nonce, most requests, most bytes, recipe | '', {request, token}...)
--   -> {'recipe' | '', {request that the caller has lost...}, {request, frame}...}
-- Renews the leases that a scorer has, but none for longer than its request's `hold`, and leases it more requests, the
-- longest asked first, with `nonce` as their token. A lease that is not renewed expires, and another scorer gets the
-- request; one that so many scorers had in vain has failed.
-- `recipe` is a digest of the configuration that the scorer obeys. One that obeys another than the run's gets no more
-- requests, and the reply says so: its model may be another one.
-- Touches: scoring:*; reads scoring, meta.
fence_scorer()
local name, time, ttl = scorer_name(1), now(), seconds(2, 3600)
local nonce, most, most_bytes = scoring_id(3), whole(4, 'requests', 0, 10000), whole(5, 'bytes', 0, 2 ^ 40)
local recipe = text(6, 'recipe', 64)
for a = 7, #ARGV, 2 do holds_request(name, a) end -- checks all arguments before anything is written
local queue, lost = scoring_queue(name), {}
for a = 7, #ARGV, 2 do
  local since, hold = unpack(call('HMGET', scoring_request(name, ARGV[a]), 'leased', 'hold'))
  if holds_request(name, a) and time < since + hold then
    call('ZADD', queue, math.min(time + ttl, since + hold), ARGV[a])
  else
    lost[#lost + 1] = ARGV[a]
  end
end

forget_abandoned(name, time)
if recipe ~= '' and recipe ~= meta('recipe') then return { 'recipe', lost } end
local reply, bytes = { '', lost }, 0
for _, id in ipairs(call('ZRANGEBYSCORE', queue, '-inf', time, 'LIMIT', 0, most)) do
  local key = scoring_request(name, id)
  local frame, tries, had_token, reason = unpack(call('HMGET', key, 'frame', 'tries', 'token', 'reason'))
  if had_token then count_scoring(name, 'expired') end
  if not frame then
    call('ZREM', queue, id)
  elseif tonumber(tries) >= MOST_TRIES then
    end_request(name, id, 'failed', reason or MOST_TRIES .. ' scorers had it and none has answered within its deadline_s')
  elseif bytes == 0 or bytes + #frame <= most_bytes then
    call('HSET', key, 'token', nonce, 'leased', time)
    call('HINCRBY', key, 'tries', 1)
    call('ZADD', queue, time + ttl, id)
    bytes = bytes + #frame
    reply[#reply + 1] = { id, frame }
  else
    break
  end
end
return reply
