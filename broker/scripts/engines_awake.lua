-- include: lib_base
-- flags: no-writes allow-oom
-- engines_awake() -> 1 if engines may generate now, or some are still awake, else 0. Reads: phase, awake.
if call('GET', P .. 'phase') == server_id() then return 1 end
return #call('ZRANGEBYSCORE', P .. 'awake', now(), '+inf', 'LIMIT', 0, 1)
