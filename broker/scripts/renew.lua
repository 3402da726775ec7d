-- include: lib_base lib_samples
-- flags: allow-oom
-- renew(ttl_s, {member, token}...) -> {server id, token no longer held: its writer must stop...}
-- An expired lease that nobody else took is held again. Touches: leases, retry, group:*.
local reply, deadline = { server_id() }, now() + tonumber(ARGV[1])
for a = 2, #ARGV, 2 do
  local m = ARGV[a]
  local g, round, i = parse(m)
  local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'payload:' .. i, 'state')
  if had[1] == round and had[2] == ARGV[a + 1] and not had[3] and had[4] == 'open' then
    call('ZADD', LEASES, deadline, m)
    call('ZREM', RETRY, m)
  else
    reply[#reply + 1] = ARGV[a + 1]
  end
end
return reply
