-- include: lib_base lib_arguments lib_scoring
-- flags: allow-oom
-- score_answer(scorer's name, {request, token, float32 values}...) -> {outcome...}
-- Hands scores in. The first answer under a request's newest lease counts. Touches: scoring:*; reads scoring.
fence_scorer()
local name, outcomes = scorer_name(1), {}
for a = 2, #ARGV, 3 do
  scoring_id(a)
  scoring_id(a + 1)
  text(a + 2, 'values', MOST_REQUEST_BYTES)
end
for a = 2, #ARGV, 3 do
  local id = ARGV[a]
  local token, answered, failed = unpack(call('HMGET', scoring_request(name, id), 'token', 'answered', 'failed'))
  local outcome = token == ARGV[a + 1] and not failed and (answered and 'duplicate' or 'accepted') or 'fenced'
  if outcome == 'accepted' then end_request(name, id, 'answered', ARGV[a + 2]) end
  outcomes[#outcomes + 1] = outcome
end
return outcomes
