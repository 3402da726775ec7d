-- Weight versions, their archive, and the blobs that go with them.

-- version(incarnation, owner, server, 'offered' | 'announced', version incarnation, version step, blob key) -> OK
-- Compares and sets: an offered or announced version must be newer than the announced one and no older than the newest
-- offer. An owner may repeat its own last call, whose reply was lost; an announcement also after it has offered a
-- newer version. The learner has SET the manifest under `blob key` (with a TTL) before. A notification tells workers
-- of it. Touches: meta, manifest:*, stage:*, bell; after a rewind also the keys that fork and renumber touch.
verb('version', { 'allow-oom' }, function()
  local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
  if fenced then call('UNLINK', PUBLIC .. ARGV[7]) return fenced end
  local what, incarnation, step, by = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), redis.sha1hex(ARGV[2])
  -- Returns 1 if the version is newer than the one that `name` holds, 0 if it is this owner's own, and -1 otherwise.
  local function compare(name)
    local held = call('HMGET', META, name .. '_incarnation', name .. '_step', name .. '_by')
    if not held[1] then return 1 end
    local i, s = tonumber(held[1]), tonumber(held[2])
    if incarnation == i and step == s then return held[3] == by and 0 or -1 end
    return (incarnation > i or (incarnation == i and step > s)) and 1 or -1
  end
  local function put(name)
    call('HSET', META, name .. '_incarnation', incarnation, name .. '_step', step, name .. '_by', by)
    if name == 'announced' then call('HSET', META, 'announced_at', now()) end
    raise_highest(step)
  end

  local against = compare('announced')
  local is_repeated = what == 'announced' and against == 0
  if against < 0 or (compare('offered') < 0 and not is_repeated) then
    call('UNLINK', PUBLIC .. ARGV[7])
    local held = call('HMGET', META, 'announced_incarnation', 'announced_step', 'offered_incarnation', 'offered_step')
    for a = 1, 4 do held[a] = held[a] or '-' end
    return redis.error_reply('REGRESSION ' .. table.concat(held, ' '))
  end
  if call('EXISTS', PUBLIC .. ARGV[7]) == 0 then return redis.error_reply('NOBLOB') end
  local before = announced_step()
  put(what)
  if compare('offered') > 0 then put('offered') end
  call('RENAME', PUBLIC .. ARGV[7], PUBLIC .. 'manifest:' .. what)
  call('PERSIST', PUBLIC .. 'manifest:' .. what)
  call('XADD', PUBLIC .. 'bell', 'MAXLEN', 1, '*', 'rung', '')
  if what == 'announced' and before and step < before then
    fork(incarnation, step)
    renumber(step)
  end
  return redis.status_reply('OK')
end)

-- put(incarnation, owner, server, key, staged key, keep) -> OK
-- Moves a blob that the learner has SET under the staged key (with a TTL) to `key`. With keep > 0, `key` is a list of
-- at most `keep` entries, and the blob becomes its last one. A new broadcast group notifies workers, which read it
-- only then. Touches: the key, stage:*, meta, bell.
verb('put', { 'allow-oom' }, function()
  local fenced = fence(ARGV[1], ARGV[2], ARGV[3])
  if fenced then call('UNLINK', PUBLIC .. ARGV[5]) return fenced end
  local keep = tonumber(ARGV[6])
  if call('EXISTS', PUBLIC .. ARGV[5]) == 0 then return redis.error_reply('NOBLOB') end
  if keep == 0 then
    call('RENAME', PUBLIC .. ARGV[5], PUBLIC .. ARGV[4])
    call('PERSIST', PUBLIC .. ARGV[4])
    if ARGV[4] == 'broadcast' then
      call('HSET', META, 'group', ARGV[5])
      call('XADD', PUBLIC .. 'bell', 'MAXLEN', 1, '*', 'rung', '')
    end
  else
    call('RPUSH', P .. ARGV[4], call('GET', PUBLIC .. ARGV[5]))
    call('LTRIM', P .. ARGV[4], -keep, -1)
    call('UNLINK', PUBLIC .. ARGV[5])
  end
  return redis.status_reply('OK')
end)

-- archive(incarnation, owner, server, ttl in s, bytes, blob...) -> {1 where the blob is there, else 0, ...}
-- Lists the blobs of the weight archive, `bytes` together, whether or not they are stored yet: the learner SETs a blob
-- after it has listed it. Frees blobs that were listed before and are not now; renews the time to live of the others.
-- Touches: meta, archive, archive:*.
owner_verb('archive', { 'allow-oom' }, function()
  local kept, there = {}, {}
  for a = 6, #ARGV do kept[ARGV[a]] = true end
  for _, name in ipairs(call('SMEMBERS', P .. 'archive')) do
    if not kept[name] then call('UNLINK', PUBLIC .. name) end
  end
  call('UNLINK', P .. 'archive')
  for a = 6, #ARGV do
    call('SADD', P .. 'archive', ARGV[a])
    there[a - 5] = call('EXPIRE', PUBLIC .. ARGV[a], ARGV[4])
  end
  call('HSET', META, 'archive_bytes', ARGV[5])
  return there
end)
