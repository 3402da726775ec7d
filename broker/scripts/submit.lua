-- include: lib_base lib_samples
-- submit(member, token, payload, bytes, tokens, is again, oldest step, {incarnation, its newest step}...) -> outcome
-- The payload was SET (with a TTL) just before, under a key of its own. The first finished sample of a round wins; whoever
-- lost the lease, writes for an earlier round, or used weights of an abandoned branch is fenced, its payload freed. What is
-- submitted again (1) was accepted once by a server that may have forgotten it, lease and all: there the round decides.
-- Touches: meta, leases, retry, open, ready, group:*, segments:*, payload:* (PERSIST, UNLINK).
local m, payload, bytes, tokens = ARGV[1], ARGV[3], ARGV[4], ARGV[5]
local g, round, i = parse(m)
local key = group_key(g)
local had_round, state, token, had_payload, from, oldest, newest, size, done, had_bytes = fields(g, 'round', 'state',
  'token:' .. i, 'payload:' .. i, 'step:' .. i, 'oldest:' .. i, 'newest', 'size', 'done', 'bytes')
local mine = had_round == round and (token == ARGV[2] or ARGV[6] == '1')
if mine and had_payload then
  -- The same one again, its reply lost: storing it once more has put a time to live on it.
  if had_payload == payload then keep_blob(payload) else free_blob(payload) end
  return 'duplicate'
end
local newest_now, is_void = newest_of(8)
if mine and is_void and state == 'open' and token == ARGV[2] then hand_back(m) end
if not mine or is_void or state ~= 'open' then
  free_blob(payload)
  if ARGV[6] ~= '1' then -- else most of it was trained long ago
    count('wasted_tokens', tokens)
    count('fenced')
  end
  return 'fenced'
end
if not keep_blob(payload) then return 'no payload' end
if call('ZREM', LEASES, m) == 0 then call('ZREM', RETRY, m) end
if oldest then
  free_segments(g, m, i)
  had_bytes = field(g, 'bytes')
end
count('payload_bytes', bytes)
count('generated_tokens', tokens)
done = (done or 0) + 1
local is_done = done == tonumber(size)
call('HSET', key, 'token:' .. i, ARGV[2], 'payload:' .. i, payload, 'step:' .. i, ARGV[7], 'done', done,
  'bytes', (had_bytes or 0) + bytes, 'state', is_done and 'ready' or 'open')
note_newest(g, newest, newest_now)
if from ~= ARGV[7] then refloor(g) end
if is_done then
  call('ZREM', OPEN, g)
  call('ZADD', READY, field(g, 'floor'), g)
end
return 'accepted'
