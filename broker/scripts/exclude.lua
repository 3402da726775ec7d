-- include: lib_base lib_arguments
-- exclude(worker, 'drain' or 'quarantine') -> 1, or 0 where no worker of that name is alive
-- A worker that drains is told so by its next heartbeat, and hands its work back; one in quarantine gets no more
-- leases. Only the learner's user may ask for it: a worker's user cannot read `owner`. Both hold for the worker's
-- process, not for another one of its name. Touches: dismissed, quarantined; reads: owner, session:*, worker:*.
call('GET', PUBLIC .. 'owner')
local worker, manner = worker_name(1), text(2, 'manner', 10)
local session = call('GET', P .. 'session:' .. worker)
if not session or call('EXISTS', P .. 'worker:' .. worker) == 0 then return 0 end
if manner == 'quarantine' then
  call('SADD', P .. 'quarantined', worker .. ' ' .. session)
else
  call('HSET', P .. 'dismissed', worker, session)
  call('EXPIRE', P .. 'dismissed', 86400)
end
return 1
