-- include: lib_base lib_arguments lib_tokens
-- flags: allow-oom
-- renew(ttl_s, {member, token}...) -> {server id, token of a lease that the caller has lost...}
-- Renews leases, also expired ones that no other worker has taken, but none that had no new segment for
-- `lease_hold_s`. A copy lasts until its sample is done.
-- Touches: leases, retry; reads group:*.
local time, reply = now(), { server_id() }
local deadline, earliest = time + seconds(1, limit('lease_ttl_s', 3600)), time - limit('lease_hold_s', 86400)
for a = 2, #ARGV, 2 do
  local m, token = ARGV[a], text(a + 1, 'token', 200)
  local g, round, i = sample(a)
  local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'payload:' .. i, 'state', 'since:' .. i)
  local is_wanted = had[1] == round and not had[3] and had[4] == 'open'
  if is_wanted and had[2] == token and (moved_at(had[2], had[5]) or time) >= earliest then
    call('ZADD', LEASES, deadline, m)
    call('ZREM', RETRY, m)
  elseif not (is_wanted and copy_of(m, token)) then
    reply[#reply + 1] = token
  end
end
return reply
