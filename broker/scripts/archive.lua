-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- archive(incarnation, owner, server, ttl in s, bytes, blob...) -> {1 where the blob is there, else 0, ...}
-- The archive of weights is these blobs and no others, so many bytes together, whether or not they are there yet: what
-- was listed before and is not now is freed, what stays gets a new time to live. Blobs come by SET, after they are listed.
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
