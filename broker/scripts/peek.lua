-- include:
-- flags: no-writes allow-oom
-- peek() -> {state, offered incarnation, offered step, announced incarnation, announced step, group}, nil where not
-- set. `group` changes whenever the broadcast group is stored.
-- Workers call it all the time, so it includes none of the shared files, whose set-up costs more than this call.
-- Reads: meta.
return redis.call('HMGET', P .. 'meta', 'state', 'offered_incarnation', 'offered_step', 'announced_incarnation',
  'announced_step', 'group')
