-- Blobs and keys that the run needs no more.

-- garbage(incarnation, owner, server, n, last) -> {blob...}, at most 1000, which the caller must free
-- The caller has freed the first n blobs of the garbage list, and `last` is the n-th. Where the reply was lost it says
-- so twice; `last` keeps a second call from removing others. Touches: garbage.
owner_verb('garbage', {}, function()
  local n = tonumber(ARGV[4])
  if n > 0 and call('LINDEX', P .. 'garbage', n - 1) == ARGV[5] then call('LTRIM', P .. 'garbage', n, -1) end
  return call('LRANGE', P .. 'garbage', 0, 999)
end)

-- recorded(incarnation, owner, server | '', blob...) -> {bytes recorded for the blob, or -1 where there is none...}
-- For blobs on other shards, which scripts cannot reach. The answer may be shorter than the question, so that one call
-- does not hold up other clients. Reads: group:*, segments:*.
owner_verb('recorded', { 'allow-oom' }, function()
  local reply, seen = {}, {}
  for a = 4, #ARGV do
    reply[a - 3] = recorded_bytes(ARGV[a], seen) or -1
    if (seen.entries or 0) > MOST_ENTRIES then break end
  end
  return reply
end)

-- free_orphans(incarnation, owner, server | '', payload TTL in ms, patience in ms, name...)
--   -> {keys freed, bytes freed, keys among them that no Headway worker leaves, how many names were judged}
-- Frees those of the named keys that the run does not need: hidden keys without the run's secret; blobs that were not
-- recorded within `patience`, or are larger than recorded. Recorded blobs of the right size stay.
-- Fewer names than given may be judged, so that one call does not hold up other clients.
-- Touches: hidden:*, payload:*, segment:*, durable, fault:*.
owner_verb('free_orphans', { 'allow-oom' }, function()
  local ttl, patience = tonumber(ARGV[4]), tonumber(ARGV[5])
  local MOST_FAULT_BYTES = 8000 -- see broker/client/supervision.py
  local LEFT_OVER, FOREIGN = 1, 2 -- left by a worker that died or came too late; written by another program

  local seen = {}

  local function judge_blob(name)
    local left = call('PTTL', PUBLIC .. name)
    if left >= 0 and left <= ttl and ttl - left < patience then return end
    local bytes = recorded_bytes(name, seen)
    if not bytes then return left >= 0 and left <= ttl and LEFT_OVER or FOREIGN end
    if call('STRLEN', PUBLIC .. name) > bytes then return FOREIGN end
    if left >= 0 then call('PERSIST', PUBLIC .. name) end -- a worker stored it once more and died before it submitted
  end

  local function judge_fault(name)
    if call('STRLEN', PUBLIC .. name) > MOST_FAULT_BYTES or call('PTTL', PUBLIC .. name) < 0 then return FOREIGN end
  end

  local function judge(name)
    local is_ours = string.sub(PUBLIC .. name, 1, #P) == P
    if is_ours or call('EXISTS', PUBLIC .. name) == 0 then return end
    if string.find(name, '}', 1, true) or string.find(name, '^hidden:') then return FOREIGN end
    if string.find(name, '^payload:') or string.find(name, '^segment:') then return judge_blob(name) end
    if string.find(name, '^fault:') then return judge_fault(name) end
    if name == 'durable' and call('STRLEN', PUBLIC .. name) > 0 then return FOREIGN end
  end

  local freed, bytes, foreign, judged = 0, 0, 0, 0
  for a = 6, #ARGV do
    local verdict = judge(ARGV[a])
    if verdict then
      freed, bytes = freed + 1, bytes + (call('MEMORY', 'USAGE', PUBLIC .. ARGV[a]) or 0)
      if verdict == FOREIGN then foreign = foreign + 1 end
      call('UNLINK', PUBLIC .. ARGV[a])
    end
    judged = judged + 1
    if (seen.entries or 0) > MOST_ENTRIES then break end
  end
  return { freed, bytes, foreign, judged }
end)
