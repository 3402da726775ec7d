-- include: lib_base lib_samples lib_groups
-- feed(incarnation, owner, server, {group, size, prompt tokens}...)
--   -> {how many groups were new or lost before, group whose blob is missing...}
-- Adds groups that the run does not know to the pool. The learner has SET their prompts (with a TTL) just before.
-- Idempotent.
-- Touches: meta, pool, lost, settled, dropped, group:*, prompt:* (PERSIST, UNLINK).
local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
if fenced then return fenced end
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
