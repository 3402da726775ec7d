-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- archive(incarnation, owner, server, ttl in s, bytes, blob...) -> {1 where the blob is there, else 0, ...}
-- Lists the blobs of the weight archive, `bytes` together, whether or not they are stored yet: the learner SETs a blob
-- after it has listed it. Frees blobs that were listed before and are not now; renews the time to live of the others.
-- Touches: meta, archive, archive:*.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local kept, there = {}, {}
for a = 6, #ARGV do kept[ARGV[a]] = true end
for _, name in ipairs(call('SMEMBERS', P .. 'archive')) do
  if not kept[name] then call('UNLINK', PUBLIC .. name) end
end
call('UNLINK', P .. 'archive')
for a = 6, #ARGV do
  call('SADD', P .. 'archive', ARGV[a])
  there[a - 5] = call('EXPIRE', PUBLIC .. ARGV[a], ARGV[4])
end
call('HSET', META, 'archive_bytes', ARGV[5])
return there
