-- include: lib_base lib_arguments
-- flags: allow-oom
-- rendezvous_set(name, worker, session, 'set' | 'once' | 'drop' | 'add', key, value) -> value that stands there now
-- Writes a value in the name of a worker that the learner has named as a member of the rendezvous; nil where the caller does
-- not have that worker's session. `once` leaves a word that stands; `drop` takes the word away and returns how many
-- there were; `add` adds to a number that all members share. So no worker's word stands under the name of another one,
-- and no process without a part in the meeting says any. Touches: joining:*; reads meeting:*, session:*.
local meeting, worker, session = text(1, 'meeting', 100), worker_name(2), text(3, 'session', 64)
local manner, key, word = text(4, 'manner', 4), text(5, 'key', 300), text(6, 'word', 65536)
local MOST_WORDS, LIFETIME_S = 256, 3600 -- in one hash; see broker/client/weights.py
local members = call('HMGET', PUBLIC .. 'meeting:' .. meeting, 'members')[1] or ''
if call('GET', P .. 'session:' .. worker) ~= session then return false end
if not string.find(' ' .. members .. ' ', ' ' .. worker .. ' ', 1, true) then return false end
local said = P .. 'joining:' .. meeting .. (manner == 'add' and '' or ':' .. worker)
if manner == 'drop' then return call('HDEL', said, key) end
local before = call('HGET', said, key)
if not before and call('HLEN', said) >= MOST_WORDS then refuse('word: ' .. MOST_WORDS .. ' stand in this meeting') end
if manner == 'add' then
  word = call('HINCRBY', said, key, whole(6, 'number', -1000000, 1000000))
elseif manner == 'once' and before then
  word = before
else
  call('HSET', said, key, word)
end
call('EXPIRE', said, LIFETIME_S)
return word
