-- include: lib_base lib_arguments lib_scoring
-- flags: allow-oom
-- score_report_death(session) -> how many requests were queued again.
-- The scorer process with this session has ended without giving them back; its supervisor, which made the session, says
-- so. Nobody else knows it, so this verb is refused to no user. The tokens of that process's leases begin with a digest
-- of the session. Its leases count as expired, and a request that many processes had in vain ends as failed.
-- Looks at 10000 requests of a scorer at most: the others' leases expire. Touches: scoring:*.
local session, MOST, n = text(1, 'session', 64), 10000, 0
if #session < 32 or not string.match(session, '^%x+$') then refuse('session') end
local mark = string.sub(redis.sha1hex(session), 1, 16)
for _, name in ipairs(call('SMEMBERS', SCORER_NAMES)) do
  for _, id in ipairs(call('ZRANGEBYSCORE', scoring_queue(name), '-inf', '+inf', 'LIMIT', 0, MOST)) do
    local token = call('HGET', scoring_request(name, id), 'token')
    if token and string.sub(token, 1, #mark) == mark then
      count_scoring(name, 'expired')
      queue_again(name, id, MOST_TRIES .. ' scorers had it, and the last of them died')
      n = n + 1
    end
  end
end
return n
