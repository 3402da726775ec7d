-- include: lib_base lib_arguments
-- flags: no-writes allow-oom
-- hear(meeting, {who, key}...) -> {word, or nil where it was not said...}
-- Returns words of a meeting, each from the one who is asked for: '' is the learner, '+' the numbers that members add
-- to, anything else a member. Reads: meeting:*, joining:*.
local meeting, words = text(1, 'meeting', 100), {}
for a = 2, #ARGV, 2 do
  local of = P .. 'joining:' .. meeting
  if ARGV[a] == '' then of = PUBLIC .. 'meeting:' .. meeting elseif ARGV[a] ~= '+' then of = of .. ':' .. ARGV[a] end
  words[a / 2] = call('HMGET', of, ARGV[a + 1])[1] or false
end
return words
