-- include: lib_base lib_arguments lib_tokens
-- flags: no-writes allow-oom
-- prompts({member, token}...) -> {prompt frame, or nil where the caller has no lease or the prompt is lost...}
-- Reads: group:*, prompt:*.
local frames = {}
for a = 1, #ARGV, 2 do
  local g, round, i = sample(a)
  local had = call('HMGET', group_key(g), 'round', 'token:' .. i)
  local is_leased = had[1] == round and (had[2] == ARGV[a + 1] or copy_of(ARGV[a], ARGV[a + 1]))
  frames[(a + 1) / 2] = is_leased and call('GET', PROMPT .. g) or false
end
return frames
