-- include: lib_base lib_arguments lib_samples
-- flags: allow-oom
-- release({member, token}...) -> how many leases were given back. The samples keep their segments.
-- Touches: retry, leases, open, group:*.
local n = 0
for a = 1, #ARGV, 2 do
  local g, round, i = sample(a)
  local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'payload:' .. i, 'state')
  if had[1] == round and had[2] == ARGV[a + 1] and not had[3] and had[4] == 'open' then
    hand_back(ARGV[a])
    n = n + 1
  end
end
return n
