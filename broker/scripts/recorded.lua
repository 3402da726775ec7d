-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- recorded(incarnation, owner, server | '', blob...) -> {bytes that it was said to have, or -1 where nobody recorded it, ...}
-- For blobs on other shards, where scripts do not reach. Reads: group:*, segments:*.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local reply = {}
for a = 4, #ARGV do reply[a - 3] = recorded_bytes(ARGV[a]) or -1 end
return reply
