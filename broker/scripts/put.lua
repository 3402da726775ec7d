-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- put(incarnation, owner, server, key, staged key, keep) -> OK
-- Moves a blob that the learner has SET under the staged key (with a TTL) to `key`. With keep > 0, `key` is a list of
-- at most `keep` entries, and the blob becomes its last one. A new broadcast group notifies workers, which read it
-- only then. Touches: the key, stage:*, meta, bell.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then call('UNLINK', PUBLIC .. ARGV[5]) return fenced end
local keep = tonumber(ARGV[6])
if call('EXISTS', PUBLIC .. ARGV[5]) == 0 then return redis.error_reply('NOBLOB') end
if keep == 0 then
  call('RENAME', PUBLIC .. ARGV[5], PUBLIC .. ARGV[4])
  call('PERSIST', PUBLIC .. ARGV[4])
  if ARGV[4] == 'broadcast' then
    call('HSET', META, 'group', ARGV[5])
    call('XADD', PUBLIC .. 'bell', 'MAXLEN', 1, '*', 'rung', '')
  end
else
  call('RPUSH', P .. ARGV[4], call('GET', PUBLIC .. ARGV[5]))
  call('LTRIM', P .. ARGV[4], -keep, -1)
  call('UNLINK', PUBLIC .. ARGV[5])
end
return redis.status_reply('OK')
