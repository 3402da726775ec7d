-- reject(incarnation, owner, server, step, group, round, member, reason, first bytes) -> 1, or 0 if it was not pinned.
-- A payload of a pinned group cannot be decoded: the group is generated anew, the bytes go to the dead-letter stream.
-- Touches: meta, pinned groups' queues (see requeue), dead.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
free_first()
local g = ARGV[5]
if field(g, 'pin') ~= ARGV[4] or field(g, 'round') ~= ARGV[6] then return 0 end
requeue(g)
count('rejected')
call('XADD', DEAD, 'MAXLEN', '~', 1000, '*', 'tid', ARGV[7], 'reason', ARGV[8], 'head', ARGV[9])
return 1
