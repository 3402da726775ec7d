-- include: lib_base lib_samples lib_groups
-- put(incarnation, owner, server, key, staged key, keep) -> OK
-- Stores a blob that was SET under the staged key (with a TTL): as the key itself, or with keep > 0 at the end of a list
-- of at most `keep`. Touches: the key, stage:*.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then call('UNLINK', P .. ARGV[5]) return fenced end
free_first()
local keep = tonumber(ARGV[6])
if call('EXISTS', P .. ARGV[5]) == 0 then return redis.error_reply('NOBLOB') end
if keep == 0 then
  call('RENAME', P .. ARGV[5], P .. ARGV[4])
  call('PERSIST', P .. ARGV[4])
else
  call('RPUSH', P .. ARGV[4], call('GET', P .. ARGV[5]))
  call('LTRIM', P .. ARGV[4], -keep, -1)
  call('UNLINK', P .. ARGV[5])
end
return redis.status_reply('OK')
