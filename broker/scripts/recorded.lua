-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- recorded(incarnation, owner, server | '', blob...) -> {bytes that it was said to have, or -1 where nobody recorded it, ...}
-- The answer may end early, not to hold up others. For blobs on other shards, where scripts do not reach. Reads: group:*, segments:*.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local reply, seen = {}, {}
for a = 4, #ARGV do
  reply[a - 3] = recorded_bytes(ARGV[a], seen) or -1
  if (seen.entries or 0) > MOST_ENTRIES then break end
end
return reply
