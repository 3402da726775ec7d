-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- recorded(incarnation, owner, server | '', blob...) -> {bytes recorded for the blob, or -1 where there is none...}
-- For blobs on other shards, which scripts cannot reach. The answer may be shorter than the question, so that one call
-- does not hold up other clients. Reads: group:*, segments:*.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local reply, seen = {}, {}
for a = 4, #ARGV do
  reply[a - 3] = recorded_bytes(ARGV[a], seen) or -1
  if (seen.entries or 0) > MOST_ENTRIES then break end
end
return reply
