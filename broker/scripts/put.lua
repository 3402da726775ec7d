-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- put(incarnation, owner, server, key, staged key, keep) -> OK
-- Stores a blob that was SET under the staged key (with a TTL): as the key itself, or with keep > 0 at the end of a list
-- of at most `keep`. Touches: the key, stage:*.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then call('UNLINK', PUBLIC .. ARGV[5]) return fenced end
local keep = tonumber(ARGV[6])
if call('EXISTS', PUBLIC .. ARGV[5]) == 0 then return redis.error_reply('NOBLOB') end
if keep == 0 then
  call('RENAME', PUBLIC .. ARGV[5], PUBLIC .. ARGV[4])
  call('PERSIST', PUBLIC .. ARGV[4])
else
  call('RPUSH', P .. ARGV[4], call('GET', PUBLIC .. ARGV[5]))
  call('LTRIM', P .. ARGV[4], -keep, -1)
  call('UNLINK', PUBLIC .. ARGV[5])
end
return redis.status_reply('OK')
