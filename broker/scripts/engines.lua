-- include: lib_base
-- flags: no-writes allow-oom
-- engines() -> 1 if engines may generate now, or some are awake still, else 0. Touches nothing.
if call('GET', P .. 'phase') == server_id() then return 1 end
return #call('ZRANGEBYSCORE', P .. 'awake', now(), '+inf', 'LIMIT', 0, 1)
