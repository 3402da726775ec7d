-- include: lib_base lib_arguments
-- flags: no-writes allow-oom
-- rendezvous_get(name, {writer, key}...) -> {value, or nil where there is none...}
-- Returns values of a rendezvous, each of the writer that is named: '' is the learner, '+' the numbers that members add
-- to, anything else a member. Reads: meeting:*, joining:*.
local meeting, words = text(1, 'meeting', 100), {}
for a = 2, #ARGV, 2 do
  local of = P .. 'joining:' .. meeting
  if ARGV[a] == '' then of = PUBLIC .. 'meeting:' .. meeting elseif ARGV[a] ~= '+' then of = of .. ':' .. ARGV[a] end
  words[a / 2] = call('HMGET', of, ARGV[a + 1])[1] or false
end
return words
