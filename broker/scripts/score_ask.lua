-- include: lib_base lib_arguments lib_scoring
-- score_ask(scorer's name, ttl_s, hold_s, {request, frame}...) -> {1 where the request is held now, or 0 where requests
-- of that name take as many bytes as they may...}
-- Asks scorers for the scores of token sequences. A request is forgotten once its asker has not collected for `ttl_s`.
-- A scorer keeps it for `hold_s` at most; then another one gets it. Idempotent.
-- Touches: scoring:*.
local name, time, hold = scorer_name(1), now(), seconds(3, A_DAY)
local ttl = seconds(2, 3600)
for a = 4, #ARGV, 2 do
  scoring_id(a)
  text(a + 1, 'frame', MOST_REQUEST_BYTES)
end
if call('SISMEMBER', SCORER_NAMES, name) == 0 and call('SCARD', SCORER_NAMES) >= MOST_SCORER_NAMES then
  refuse('scorer: ' .. MOST_SCORER_NAMES .. ' have requests')
end
forget_abandoned(name, time)
call('SADD', SCORER_NAMES, name)
local held = {}
for a = 4, #ARGV, 2 do
  local id, frame = ARGV[a], ARGV[a + 1]
  local key, bytes = scoring_request(name, id), tonumber(call('HGET', scoring_counts(name), 'bytes') or 0)
  local is_held = call('EXISTS', key) == 1
  if not is_held and bytes + #frame <= MOST_SCORING_BYTES then
    call('HSET', key, 'frame', frame, 'bytes', #frame, 'since', time, 'hold', hold, 'tries', 0)
    call('EXPIRE', key, A_DAY)
    call('ZADD', scoring_queue(name), time, id)
    count_scoring(name, 'bytes', #frame)
    is_held = true
  end
  if is_held then call('ZADD', scoring_asked(name), time + ttl, id) end
  held[#held + 1] = is_held and 1 or 0
end
for _, key in ipairs({ SCORER_NAMES, scoring_queue(name), scoring_asked(name), scoring_counts(name) }) do
  call('EXPIRE', key, A_DAY)
end
return held
