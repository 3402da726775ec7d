-- include: lib_base
-- flags: allow-oom
-- end_swap_turn(token) -> OK. Gives a swap turn (see swap_turn.lua) back: another worker may have it at once.
-- Touches: turns, turns:*.
for _, name in ipairs({ 'turns', 'turns:begun', 'turns:others', 'turns:begun:others' }) do
  call('ZREM', P .. name, ARGV[1])
end
return redis.status_reply('OK')
