-- include: lib_base lib_arguments lib_samples lib_groups lib_evaluations
-- flags: allow-oom
-- evaluation_release(version, {sample, token}...) -> how many leases were given back, for other workers to take.
-- Touches: evaluating:*, evaluation:*.
local version, n = text(1, 'version', 50), 0
local key, queue = evaluation_key(version), evaluating_key(version)
for a = 2, #ARGV, 2 do
  local i = whole(a, 'sample', 0, 2147483647)
  if call('HGET', key, 'token:' .. i) == text(a + 1, 'token', 64) and call('ZSCORE', queue, i) then
    call('ZADD', queue, 0, i)
    call('HDEL', key, 'token:' .. i, 'by:' .. i)
    n = n + 1
  end
end
return n
