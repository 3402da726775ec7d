-- include: lib_base lib_arguments
-- flags: allow-oom
-- turn(token, ttl_s, share of the serving workers, or nothing: renew only) -> 1 if the token holds a turn now, else 0
-- A swap turn is the right, until a deadline, to pause an engine and swap its weights while others generate (not a
-- turn of an episode). It is granted while fewer than `share` of the serving workers, rounded down, hold one, and
-- always while no worker does. It ends when it is given back (end_turn) or at its deadline. Touches: turns, serving.
local TURNS, SERVING, share = P .. 'turns', P .. 'serving', ARGV[3] and seconds(3, 1)
text(1, 'token', 200)
local time, ttl_s = now(), seconds(2, 600)
for _, token in ipairs(call('ZRANGEBYSCORE', TURNS, '-inf', time)) do call('ZREM', TURNS, token) end
local others, is_held = 0, false
for _, token in ipairs(call('ZRANGE', TURNS, 0, -1)) do
  if token == ARGV[1] then is_held = true else others = others + 1 end
end

-- Returns how many serving workers are alive, and forgets the others; a later heartbeat adds such a worker again.
local function serving()
  local alive = 0
  for _, worker in ipairs(call('SMEMBERS', SERVING)) do
    if call('EXISTS', P .. 'worker:' .. worker) == 1 then
      alive = alive + 1
    else
      call('SREM', SERVING, worker)
    end
  end
  return alive
end

if not is_held and (not share or (others > 0 and others >= math.floor(serving() * share))) then return 0 end
call('ZADD', TURNS, time + ttl_s, ARGV[1])
local last = call('ZRANGE', TURNS, -1, -1, 'WITHSCORES')[2]
call('EXPIRE', TURNS, math.ceil(tonumber(last) - time) + 1)
return 1
