-- include:
-- flags: no-writes allow-oom
-- glance() -> {state, offered incarnation, offered step, announced incarnation, announced step}, nil where there is none
-- Asked for all the time, so without the libraries, which cost more than it does. Reads: meta.
return redis.call('HMGET', P .. 'meta', 'state', 'offered_incarnation', 'offered_step', 'announced_incarnation',
  'announced_step')
