-- include: lib_base lib_samples lib_groups lib_tokens
-- flags: allow-oom
-- reject(incarnation, owner, server, step, group, round, member, reason, first bytes, 'prompt' | 'damaged' | 'sample')
--   -> 1, or 0 if the group is not pinned to this step in this round.
-- 'sample': the payload cannot be trained; the sample is generated anew, and its worker is blamed. 'damaged': the
-- payload is missing or damaged; the sample is generated anew. 'prompt': the prompt is damaged; the learner feeds it
-- again, and the whole group is generated anew. The first bytes go to the dead-letter stream.
-- Touches: meta, all keys of a group (see redo, requeue), prompt:*, lost, dead, strikes, quarantined, refused.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local g = ARGV[5]
if field(g, 'pin') ~= ARGV[4] or field(g, 'round') ~= ARGV[6] then return 0 end
local _, _, i = parse(ARGV[7])
local by = i and field(g, 'by:' .. i)
if ARGV[10] == 'prompt' then
  call('UNLINK', PROMPT .. g)
  requeue(g)
elseif field(g, 'trimmed') == '1' then -- its trimmed samples are in no queue, so the group could not become whole
  requeue(g)
else
  redo(g, i)
end
if i and ARGV[10] ~= 'prompt' then call('SADD', REFUSED, g .. ':' .. i) end
give_up_reproducing(tonumber(ARGV[4]))
local blamed = ARGV[10] == 'sample' and by or nil
to_dead_letters(ARGV[7], name_of(by), ARGV[8], ARGV[9], blamed)
strike(blamed)
return 1
