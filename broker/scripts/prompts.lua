-- include: lib_base lib_arguments
-- flags: no-writes allow-oom
-- prompts({member, token}...) -> {prompt frame, or nil where the caller has no lease or the prompt is lost...}
-- Reads: group:*, prompt:*.
local frames = {}
for a = 1, #ARGV, 2 do
  local g, round, i = sample(a)
  local had = call('HMGET', group_key(g), 'round', 'token:' .. i)
  frames[(a + 1) / 2] = had[1] == round and had[2] == ARGV[a + 1] and call('GET', PROMPT .. g)
end
return frames
