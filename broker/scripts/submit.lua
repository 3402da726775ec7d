-- submit(member, token, payload, tokens, oldest step, {incarnation, its newest step}...) -> {outcome, server id}
-- The payload was SET (with a TTL) just before, under a key of its own. The first finished sample of a round wins;
-- whoever lost the lease, writes for an earlier round, or used weights of an abandoned branch is fenced, its payload freed.
-- Touches: meta, leases, retry, open, ready, group:*, payload:* (PERSIST, STRLEN, UNLINK).
local g, round, i = parse(ARGV[1])
local payload = P .. ARGV[3]
local had = call('HMGET', group_key(g), 'round', 'state', 'token:' .. i, 'payload:' .. i)
local mine = had[1] == round and had[3] == ARGV[2]
if mine and had[4] then
  if had[4] ~= ARGV[3] then call('UNLINK', payload) end
  return { 'duplicate', server_id() }
end
local newest, is_void = -1, false
for a = 6, #ARGV, 2 do
  newest = math.max(newest, tonumber(ARGV[a + 1]))
  is_void = is_void or is_abandoned(tonumber(ARGV[a]), tonumber(ARGV[a + 1]))
end
if mine and is_void and had[2] == 'open' then hand_back(ARGV[1]) end
if not mine or is_void or had[2] ~= 'open' then
  call('UNLINK', payload)
  count('wasted_tokens', ARGV[4])
  count('fenced')
  return { 'fenced', server_id() }
end
if call('EXISTS', payload) == 0 then return { 'no payload', server_id() } end
call('PERSIST', payload)
call('ZREM', LEASES, ARGV[1])
local bytes, key = call('STRLEN', payload), group_key(g)
count('payload_bytes', bytes)
count('submitted')
count('generated_tokens', ARGV[4])
call('HINCRBY', key, 'bytes', bytes)
call('HSET', key, 'payload:' .. i, ARGV[3], 'step:' .. i, ARGV[5])
if newest > (tonumber(field(g, 'newest') or '') or -1) then call('HSET', key, 'newest', newest) end
refloor(g)
if call('HINCRBY', key, 'done', 1) == size_of(g) then
  call('ZREM', OPEN, g)
  call('HSET', key, 'state', 'ready')
  call('ZADD', READY, field(g, 'floor'), g)
end
return { 'accepted', server_id() }
