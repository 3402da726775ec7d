-- include: lib_base lib_arguments lib_scoring
-- flags: allow-oom
-- score_release(scorer's name, reason, {request, token}...) -> how many leases were given back
-- Gives leases back at once, for other scorers. An empty reason: the scorer leaves, and has not tried. Else it cannot
-- score the request; so many scorers that cannot end it. Touches: scoring:*; reads scoring.
fence_scorer()
local name, reason, n = scorer_name(1), quoted(2, 2000), 0
for a = 3, #ARGV, 2 do holds_request(name, a) end
for a = 3, #ARGV, 2 do
  if holds_request(name, a) then
    local key = scoring_request(name, ARGV[a])
    if reason == '' then call('HINCRBY', key, 'tries', -1) else call('HSET', key, 'reason', reason) end
    queue_again(name, ARGV[a], reason)
    n = n + 1
  end
end
return n
