-- Prompts, which the learner feeds.

-- feed(incarnation, owner, server, {group, size, prompt tokens}...)
--   -> {how many groups were new or lost before, group whose blob is missing...}
-- Adds groups that the run does not know to the pool. The learner has SET their prompts (with a TTL) just before.
-- Idempotent.
-- Touches: meta, pool, lost, settled, dropped, group:*, prompt:* (PERSIST, UNLINK).
owner_verb('feed', {}, function()
  local reply = { 0 }
  for a = 4, #ARGV, 3 do
    local g, blob, length = ARGV[a], PROMPT .. ARGV[a], length_class(tonumber(ARGV[a + 2]))
    if is_settled(g) then
      call('UNLINK', blob)
      call('SREM', LOST, g)
    elseif call('EXISTS', blob) == 0 then
      reply[#reply + 1] = g
    else
      call('PERSIST', blob)
      call('SREM', LOST, g)
      if field(g, 'state') == 'lost' then
        call('HSET', group_key(g), 'prompt', redis.sha1hex(call('GET', blob)))
        enqueue(g, fields(g, 'index', 'round', 'size'))
        reply[1] = reply[1] + 1
      end
      if call('EXISTS', group_key(g)) == 0 then
        call('HSET', group_key(g), 'size', ARGV[a + 1], 'length', length, 'round', 0, 'state', 'pool',
          'prompt', redis.sha1hex(call('GET', blob)))
        call('ZADD', POOL, 0, g)
        reply[1] = reply[1] + 1
      end
    end
  end
  return reply
end)

-- close_feed(incarnation, owner, server) -> OK. The learner feeds no more prompts: it may take a last, short batch.
-- Touches: meta.
owner_verb('close_feed', {}, function()
  call('HSET', META, 'feed_closed', 1)
  return redis.status_reply('OK')
end)

-- mark_lost(member, token, reason, first bytes)
--   -> 1, or 0 if the lease is no longer held, or the prompt is as it was fed
-- Reports a damaged prompt. The learner feeds the group again, and the samples of its current round are void.
-- Touches: all keys of a group (see requeue), lost, dead.
verb('mark_lost', { 'allow-oom' }, function()
  local g, round, i = sample(1)
  local had_round, token, state, digest = fields(g, 'round', 'token:' .. i, 'state', 'prompt')
  local prompt = call('GET', PROMPT .. g)
  if had_round ~= round or token ~= ARGV[2] or state ~= 'open' then return 0 end
  if prompt and redis.sha1hex(prompt) == digest then return 0 end
  call('UNLINK', PROMPT .. g)
  requeue(g)
  to_dead_letters(g, '', quoted(3, 2000), quoted(4, 256))
  return 1
end)
