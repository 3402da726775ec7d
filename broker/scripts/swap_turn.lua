-- include: lib_base lib_arguments
-- flags: allow-oom
-- swap_turn(token, session, ttl_s, share of the serving workers, or nothing: renew only) -> 1 if the token holds a turn now,
-- else 0
-- A swap turn is the right, until a deadline, to pause an engine and swap its weights while others generate (not a
-- turn of an episode). It is granted while fewer than `share` of the serving workers, rounded down, hold one, and
-- always while no worker does. It ends when it is given back (end_turn), at its deadline, or after LONGEST_S. A worker
-- that had one waits for those that ask and had none since. A token begins with its worker's name; those that no
-- serving worker of this session asks for have turns of their own, which hold up no worker.
-- Touches: turns, turns:*, serving; reads session:*.
local LONGEST_S, ASKS_S = 60, 1
local token, session = text(1, 'token', 200), text(2, 'session', 64)
local time, ttl_s, SERVING = now(), seconds(3, 600), P .. 'serving'
local share = ARGV[4] and seconds(4, 1)
local worker = string.match(token, '^(%w[%w._-]*):')
local serves = worker and call('SISMEMBER', SERVING, worker) == 1 and call('GET', P .. 'session:' .. worker) == session
local kind = serves and '' or ':others'
local TURNS, BEGUN = P .. 'turns' .. kind, P .. 'turns:begun' .. kind
local ASKING, LAST = P .. 'turns:asking', P .. 'turns:last'

local function finish(one)
  call('ZREM', TURNS, one)
  call('ZREM', BEGUN, one)
end
for _, one in ipairs(call('ZRANGEBYSCORE', TURNS, '-inf', time)) do finish(one) end
for _, one in ipairs(call('ZRANGEBYSCORE', BEGUN, '-inf', time - LONGEST_S)) do finish(one) end
local others, is_held = 0, false
for _, one in ipairs(call('ZRANGE', TURNS, 0, -1)) do
  if one == token then is_held = true else others = others + 1 end
end

-- Returns how many serving workers are alive, and forgets the others; a later heartbeat adds such a worker again.
local function serving()
  local alive = 0
  for _, name in ipairs(call('SMEMBERS', SERVING)) do
    if call('EXISTS', P .. 'worker:' .. name) == 1 then
      alive = alive + 1
    else
      call('SREM', SERVING, name)
    end
  end
  return alive
end

-- Returns how many workers ask now and have waited since before this one's last turn.
local function earlier()
  local last, count = tonumber(call('ZSCORE', LAST, worker) or 0), 0
  for _, name in ipairs(call('ZRANGEBYSCORE', ASKING, time - ASKS_S, '+inf')) do
    if name ~= worker and tonumber(call('ZSCORE', LAST, name) or 0) < last then count = count + 1 end
  end
  return count
end

if not is_held then
  if not share then return 0 end
  local places = math.max(1, math.floor(serving() * share)) - others
  if places <= (serves and places > 0 and earlier() or 0) then
    if serves then
      call('ZADD', ASKING, time, worker)
      call('EXPIRE', ASKING, 60)
    end
    return 0
  end
  call('ZADD', BEGUN, time, token)
  if serves then
    call('ZREM', ASKING, worker)
    call('ZADD', LAST, time, worker)
    call('EXPIRE', LAST, 3600)
  end
end
call('ZADD', TURNS, time + ttl_s, token)
local last = call('ZRANGE', TURNS, -1, -1, 'WITHSCORES')[2]
for _, key in ipairs({ TURNS, BEGUN }) do call('EXPIRE', key, math.ceil(tonumber(last) - time) + 1) end
return 1
