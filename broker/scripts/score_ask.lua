-- include: lib_base lib_arguments lib_scoring
-- score_ask(scorer's name, worker | '', session, ttl_s, hold_s, {request, frame}...)
--   -> {1 where the request is held now, or 0 where there is no room for it...}
-- Asks scorers of the run for the scores of token sequences. A request is forgotten once its asker has not collected
-- for `ttl_s`, a minute at most. A scorer keeps it for `hold_s` at most; then another one gets it. Where there is no
-- room, the newest request of the asker with most bytes makes room for one with fewer. Idempotent.
-- Touches: scoring:*; reads meta, owner, session:*, quarantined.
local name, time, by = scorer_name(1), now(), asker(2, 3)
local ttl, hold = seconds(4, LONGEST_ASKED_S), seconds(5, A_DAY)
for a = 6, #ARGV, 2 do
  scoring_id(a)
  text(a + 1, 'frame', MOST_REQUEST_BYTES)
end
if not string.find(' ' .. (meta('scorers') or '') .. ' ', ' ' .. name .. ' ', 1, true) then
  refuse('scorer: the run has no ' .. name)
end
forget_abandoned(name, time)
call('SADD', SCORER_NAMES, name)
local held = {}
for a = 6, #ARGV, 2 do
  local id, frame = ARGV[a], ARGV[a + 1]
  local key, bytes = scoring_request(name, id), #frame + REQUEST_OVERHEAD
  local is_held = call('EXISTS', key) == 1
  if not is_held and has_scoring_room(name, by, bytes) then
    call('HSET', key, 'frame', frame, 'bytes', bytes, 'since', time, 'hold', hold, 'tries', 0, 'by', by)
    call('EXPIRE', key, A_DAY)
    call('ZADD', scoring_queue(name), time, id)
    call('ZADD', scoring_of(name, by), time, id)
    call('EXPIRE', scoring_of(name, by), A_DAY)
    count_bytes(name, by, bytes)
    is_held = true
  end
  if is_held then call('ZADD', scoring_asked(name), time + ttl, id) end
  held[#held + 1] = is_held and 1 or 0
end
for _, key in ipairs({ SCORER_NAMES, scoring_queue(name), scoring_asked(name), scoring_counts(name),
  scoring_askers(name) }) do
  call('EXPIRE', key, A_DAY)
end
return held
