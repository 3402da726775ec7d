-- renew(ttl_s, {member, token}...) -> members no longer held: their writer must stop.
-- An expired lease that nobody else took is held again. Touches: leases, group:*.
free_first()
local lost, deadline = {}, now() + tonumber(ARGV[1])
for a = 2, #ARGV, 2 do
  local g, round, i = parse(ARGV[a])
  local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'payload:' .. i)
  if had[1] == round and had[2] == ARGV[a + 1] and not had[3] then
    call('ZADD', LEASES, deadline, ARGV[a])
  else
    lost[#lost + 1] = ARGV[a]
  end
end
return lost
