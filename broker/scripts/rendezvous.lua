-- Values that the learner and the members of a broadcast group exchange while the group forms.

-- rendezvous_set(name, worker, session, 'set' | 'once' | 'drop' | 'add', key, value) -> value that stands there now
-- Writes a value in the name of a worker that the learner has named as a member of the rendezvous; nil where the caller
-- does not have that worker's session. `once` leaves a value that stands; `drop` takes the value away and returns how
-- many there were; `add` adds to a number that all members share. So no value stands under the name of another worker,
-- and no process without a part in the rendezvous writes any. Touches: joining:*; reads meeting:*, session:*.
verb('rendezvous_set', { 'allow-oom' }, function()
  local meeting, worker, session = text(1, 'meeting', 100), worker_name(2), text(3, 'session', 64)
  local manner, key, word = text(4, 'manner', 4), text(5, 'key', 300), text(6, 'word', 65536)
  local MOST_WORDS, LIFETIME_S = 256, 3600 -- in one hash; see broker/client/weights.py
  local members = call('HMGET', PUBLIC .. 'meeting:' .. meeting, 'members')[1] or ''
  if call('GET', P .. 'session:' .. worker) ~= session then return false end
  if not string.find(' ' .. members .. ' ', ' ' .. worker .. ' ', 1, true) then return false end
  local hash = P .. 'joining:' .. meeting .. (manner == 'add' and '' or ':' .. worker)
  if manner == 'drop' then return call('HDEL', hash, key) end
  local before = call('HGET', hash, key)
  if not before and call('HLEN', hash) >= MOST_WORDS then refuse('word: ' .. MOST_WORDS .. ' stand in this meeting') end
  if manner == 'add' then
    word = call('HINCRBY', hash, key, whole(6, 'number', -1000000, 1000000))
  elseif manner == 'once' and before then
    word = before
  else
    call('HSET', hash, key, word)
  end
  call('EXPIRE', hash, LIFETIME_S)
  return word
end)

-- rendezvous_get(name, {writer, key}...) -> {value, or nil where there is none...}
-- Returns values of a rendezvous, each of the writer that is named: '' is the learner, '+' the numbers that members add
-- to, anything else a member. Reads: meeting:*, joining:*.
verb('rendezvous_get', { 'no-writes', 'allow-oom' }, function()
  local meeting, words = text(1, 'meeting', 100), {}
  for a = 2, #ARGV, 2 do
    local of = P .. 'joining:' .. meeting
    if ARGV[a] == '' then of = PUBLIC .. 'meeting:' .. meeting elseif ARGV[a] ~= '+' then of = of .. ':' .. ARGV[a] end
    words[a / 2] = call('HMGET', of, ARGV[a + 1])[1] or false
  end
  return words
end)
