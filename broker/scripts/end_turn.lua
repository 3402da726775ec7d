-- include: lib_base
-- flags: allow-oom
-- end_turn(token) -> OK. Gives a swap turn (see turn.lua) back: another worker may have it at once. Touches: turns.
call('ZREM', P .. 'turns', ARGV[1])
return redis.status_reply('OK')
