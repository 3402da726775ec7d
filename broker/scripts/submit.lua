-- submit(member, token, payload, bytes, tokens, is again, oldest step, {incarnation, its newest step}...) -> outcome
-- The payload was SET (with a TTL) just before, under a key of its own. The first finished sample of a round wins; whoever
-- lost the lease, writes for an earlier round, or used weights of an abandoned branch is fenced, its payload freed. What is
-- submitted again (1) was accepted once by a server that may have forgotten it, lease and all: there the round decides.
-- Touches: meta, leases, retry, open, ready, group:*, segments:*, payload:* (PERSIST, UNLINK).
local m, payload, bytes, tokens = ARGV[1], ARGV[3], ARGV[4], ARGV[5]
local g, round, i = parse(m)
local had = call('HMGET', group_key(g), 'round', 'state', 'token:' .. i, 'payload:' .. i)
local mine = had[1] == round and (had[3] == ARGV[2] or ARGV[6] == '1')
if mine and had[4] then
  if had[4] ~= payload then free_blob(payload) end
  return 'duplicate'
end
local newest, is_void = newest_of(8)
if mine and is_void and had[2] == 'open' and had[3] == ARGV[2] then hand_back(m) end
if not mine or is_void or had[2] ~= 'open' then
  free_blob(payload)
  count('wasted_tokens', tokens)
  count('fenced')
  return 'fenced'
end
if not keep_blob(payload) then return 'no payload' end
call('ZREM', LEASES, m)
call('ZREM', RETRY, m)
free_segments(g, m, i)
count('payload_bytes', bytes)
count('submitted')
count('generated_tokens', tokens)
local key = group_key(g)
call('HINCRBY', key, 'bytes', bytes)
call('HSET', key, 'token:' .. i, ARGV[2], 'payload:' .. i, payload, 'step:' .. i, ARGV[7])
note_newest(g, newest)
refloor(g)
if call('HINCRBY', key, 'done', 1) == size_of(g) then
  call('ZREM', OPEN, g)
  call('HSET', key, 'state', 'ready')
  call('ZADD', READY, field(g, 'floor'), g)
end
return 'accepted'
