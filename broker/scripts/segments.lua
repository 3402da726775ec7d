-- Segments of samples that are being generated, and calls of agents that their engine is to answer.

-- append(member, token, index, segment, ttl_s, measures of the segment) -> {outcome, segments held}
-- Records a segment that the worker has SET (with a TTL) just before, under a key of its own, and renews the lease.
-- Only the lease's holder may append, and in order; the segments of a copy are dropped. A segment with tokens older
-- than the lease's weights is a strike.
-- Touches: meta, leases, retry, open, group:*, segments:*, segment:* (PERSIST, UNLINK), strikes, quarantined, dead.
verb('append', {}, function()
  local g, round, i = sample(1)
  local index, name = whole(3, 'index', 0, 1000000), segment_of(4, ARGV[1])
  local bytes, tokens, oldest, versions = measures(6)
  local ttl = seconds(5, limit('lease_ttl_s', 3600))
  local had = call('HMGET', group_key(g), 'round', 'state', 'token:' .. i, 'payload:' .. i, 'oldest:' .. i,
    'step:' .. i, 'newest', 'by:' .. i)
  local mine = had[1] == round and had[3] == ARGV[2] and had[2] == 'open' and not had[4]
  local newest, is_void = newest_of(versions)
  local from = had[6]
  if mine and is_older_than_lease(oldest, from, had[3], versions) then
    blame(ARGV[1], had[8], 'a segment of step ' .. oldest .. ' under a lease for weights of step ' .. from)
    is_void = true
  end
  local list = segments_key(ARGV[1])
  -- A blob that an append has recorded before stays, whoever names it again.
  local function refuse_blob()
    for _, entry in ipairs(call('LRANGE', list, 0, -1)) do
      if parse_segment(entry) == name then return end
    end
    free_blob(name)
  end
  if had[1] == round and had[2] == 'open' and not had[4] and copy_of(ARGV[1], ARGV[2]) then
    refuse_blob()
    return { 'appended', index + 1 }
  end
  if mine and is_void then restart_sample(g, ARGV[1], i, had[5]) end
  if not mine or is_void then
    refuse_blob()
    return { 'fenced', 0 }
  end
  local n, last = call('LLEN', list), call('LINDEX', list, -1)
  local is_repeated = n == index + 1 and parse_segment(last) == name
  if n ~= index and not is_repeated then
    refuse_blob()
    return { 'out of order', n }
  end
  if not keep_blob(name, bytes) then return { 'no blob', n } end
  call('ZADD', LEASES, now() + ttl, ARGV[1])
  call('ZREM', RETRY, ARGV[1])
  if is_repeated then return { 'appended', n } end
  if tokens > 0 then call('HSET', group_key(g), 'since:' .. i, now()) end
  local by_step = {}
  for at = 5, #ARGV[6], 12 do
    by_step[#by_step + 1] = string.format('%d:%d', select(2, struct.unpack('>I4I4I4', ARGV[6], at)))
  end
  call('RPUSH', list, table.concat({ name, bytes, tokens, name_of(had[8]), table.concat(by_step, ',') }, ' '))
  count('payload_bytes', bytes)
  call('HINCRBY', group_key(g), 'bytes', bytes)
  if not had[5] or oldest < tonumber(had[5]) then call('HSET', group_key(g), 'oldest:' .. i, oldest) end
  note_newest(g, had[7], newest)
  if oldest < tonumber(from) then
    call('HSET', group_key(g), 'step:' .. i, oldest)
    refloor(g)
  end
  return { 'appended', n + 1 }
end)

-- intend(member, token, digests of the calls that run) -> {1, digests of a former holder's}, or {0, ''} if the lease is
-- no longer held. A worker records an agent's calls before its engine samples their answers.
-- Touches: group:*.
verb('intend', {}, function()
  local g, round, i = sample(1)
  local calls = text(3, 'calls', 40000)
  if not string.match(calls, '^[%x ]*$') then refuse('calls') end
  local had = call('HMGET', group_key(g), 'round', 'state', 'token:' .. i, 'payload:' .. i, 'calls:' .. i)
  if had[1] == round and had[2] == 'open' and not had[4] and copy_of(ARGV[1], ARGV[2]) then return { 1, '' } end
  if had[1] ~= round or had[2] ~= 'open' or had[3] ~= ARGV[2] or had[4] then return { 0, '' } end
  local of, before = string.match(had[5] or '', '^(%S+) (.*)$')
  call('HSET', group_key(g), 'calls:' .. i, ARGV[2] .. ' ' .. calls)
  return { 1, of ~= ARGV[2] and before or '' }
end)

-- discard(member, token, index of a segment or -1, reason, first bytes) -> 1, or 0 if the lease is no longer held.
-- Frees all segments of a sample after which its holder cannot go on (-1: it cannot go on after its own continuation
-- either); the holder begins anew. The first bytes go to the dead-letter stream, with the name of the worker that
-- appended the segment. Only the reader says that a segment is bad, so no worker is blamed for it.
-- Touches: meta, group:*, segments:*, segment:*, dead.
verb('discard', { 'allow-oom' }, function()
  local g, round, i = sample(1)
  local index = whole(3, 'index', -1, 1000000)
  local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'oldest:' .. i, 'by:' .. i)
  if had[1] ~= round or had[2] ~= ARGV[2] then return 0 end
  local entry, author = index >= 0 and call('LINDEX', segments_key(ARGV[1]), index), name_of(had[4])
  if index >= 0 then author = entry and select(4, parse_segment(entry)) or '' end
  if had[3] then discard_segments(g, ARGV[1], i) end
  to_dead_letters(ARGV[1], author, quoted(4, 2000), quoted(5, 256))
  return 1
end)
