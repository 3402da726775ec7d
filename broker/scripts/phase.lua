-- include: lib_base lib_samples lib_groups
-- flags: allow-oom
-- phase(incarnation, owner, server, ttl_s) -> {worker that is awake...}
-- Engines may generate for `ttl_s` seconds from now; 0 ends the phase, and awake engines fall asleep.
-- Touches: phase, awake.
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
local PHASE, AWAKE, ttl_s = P .. 'phase', P .. 'awake', tonumber(ARGV[4])
-- The value is the server's id. A server that lost its last second may remember a phase that is over, with another id.
if ttl_s > 0 then call('SET', PHASE, server_id(), 'PX', math.ceil(1000 * ttl_s)) else call('UNLINK', PHASE) end
for _, worker in ipairs(call('ZRANGEBYSCORE', AWAKE, '-inf', now())) do call('ZREM', AWAKE, worker) end
local names = {}
for n, holder in ipairs(call('ZRANGE', AWAKE, 0, -1)) do names[n] = name_of(holder) end
return names
