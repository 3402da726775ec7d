-- include: lib_base lib_arguments lib_scoring
-- flags: allow-oom
-- score_collect(scorer's name, ttl_s, n, request...) -> {{'waiting'}, {'unknown'}, {'answered', float32 values} or
-- {'failed', reason}...} of all requests but the first n
-- Forgets the first n requests, whose asker needs them no more, and tells how far the others are. Their askers go on
-- waiting for at least `ttl_s`. A server that has lost a request does not know it: it is to be asked again.
-- Touches: scoring:*.
local name, time, ttl, forgotten = scorer_name(1), now(), seconds(2, 3600), whole(3, 'number', 0, 100000)
for a = 4, #ARGV do scoring_id(a) end
local reply = {}
for a = 4, #ARGV do
  if a < 4 + forgotten then
    forget_request(name, ARGV[a])
  else
    local found = call('HMGET', scoring_request(name, ARGV[a]), 'since', 'answered', 'failed')
    if found[1] then call('ZADD', scoring_asked(name), time + ttl, ARGV[a]) end
    reply[#reply + 1] = not found[1] and { 'unknown' } or found[2] and { 'answered', found[2] }
      or found[3] and { 'failed', found[3] } or { 'waiting' }
  end
end
return reply
