-- include: lib_base
-- flags: allow-oom
-- end_turn(token) -> OK. The next one may swap at once. Touches: turns.
call('ZREM', P .. 'turns', ARGV[1])
return redis.status_reply('OK')
