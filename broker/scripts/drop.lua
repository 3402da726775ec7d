-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- drop(incarnation, owner, server, step, group...) -> how many were dropped
-- Drops groups of the step's batch from which the learner cannot learn. The next take of this step fills their places.
-- Touches: all keys of a group (see settle), batch:*, dropped, given_up.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local n = 0
for a = 5, #ARGV do
  if field(ARGV[a], 'pin') == ARGV[4] then
    settle_dropped(ARGV[a])
    n = n + 1
  end
end
if n > 0 then give_up_reproducing(tonumber(ARGV[4])) end
count('dropped', n)
count('uninformative', n)
return n
