-- Finished samples.

-- submit(is again, {member, token, 'shard/' | '', measures of the payload}...) -> {outcome...}
-- Accepts finished samples, whose payloads the worker has SET (with a TTL) just before, under keys of their own. The
-- first finished sample of a round wins. A worker that lost the lease, writes for an earlier round, or used weights of
-- an abandoned branch is fenced, and its payload freed.
-- A sample that is submitted again (`is again` = 1) was accepted once by a server that may since have lost it and its
-- lease. It is accepted in its round if the run gave its token for this sample and its tokens are within the bound: an
-- older one would have its whole group generated anew. It takes a sample from another holder only on a server that has
-- restarted. A copy of a lease is as good as the lease.
-- Weights that no worker can have are a strike against the holder, and so are weights older than those of its lease.
-- Touches: meta, tally, leases, retry, open, ready, group:*, segments:*, payload:* (PERSIST, UNLINK), strikes,
-- quarantined, dead.
verb('submit', { 'allow-oom' }, function()
  local is_again = ARGV[1] == '1'
  local accepted, bytes_accepted, tokens_accepted, finished = {}, 0, 0, {}

  local function note_finished(tokens)
    local length = length_class(tokens)
    finished[length] = (finished[length] or 0) + 1
  end

  local function may_take(m, token)
    local is_before = is_of_earlier_server(m, token)
    return is_before or (is_before == false and not call('ZSCORE', LEASES, m))
  end

  -- Returns who holds the sample, or nil where the server does not know it.
  local function holder_of(one, is_holder, copier)
    return copier or (is_holder and field(one.g, 'by:' .. one.i)) or nil
  end

  -- Carries out a submission that `check` has returned, and returns its outcome.
  local function submit(one)
    local m, g, i, token, payload, from = one.m, one.g, one.i, one.token, one.payload, one.oldest
    local newest_now, is_void = newest_of(one.versions)
    local key = group_key(g)
    local token_field, payload_field = 'token:' .. i, 'payload:' .. i
    local had_round, state, had_token, had_payload, had_from, oldest, newest, size, done, had_bytes = fields(g, 'round',
      'state', token_field, payload_field, 'step:' .. i, 'oldest:' .. i, 'newest', 'size', 'done', 'bytes')
    had_from = tonumber(had_from or '')
    local is_holder = had_token == token
    local copied_from, copier = copy_of(m, token)
    local mine = had_round == one.round and (is_holder or (copier and not had_payload)
      or (is_again and may_take(m, token)))
    if mine and had_payload then
      -- The same payload comes again, as its reply was lost: SET has put a time to live on it, which must go.
      if had_payload == payload then keep_blob(payload) else free_blob(payload) end
      return 'duplicate'
    end
    if mine and not is_again and is_impossible(newest_now) then
      blame(m, holder_of(one, is_holder, copier), 'tokens of weights ' .. newest_now .. ', which were never announced')
      is_void = true
    elseif mine and is_holder and is_older_than_lease(from, had_from, token, one.versions) then
      blame(m, holder_of(one, is_holder, copier),
        'tokens of step ' .. from .. ' under a lease for weights of step ' .. had_from)
      is_void = true
    end
    is_void = is_void or (copied_from and from < tonumber(copied_from))
    if mine and not is_void and not is_again and is_any_refused() then
      local holder = holder_of(one, is_holder, copier)
      is_void = holder and is_barred(g, i, holder)
    end
    is_void = is_void or (not is_holder and is_over_bound(from))
    if mine and is_void and state == 'open' and is_holder then restart_sample(g, m, i, oldest) end
    if not mine or is_void or state ~= 'open' then
      free_blob(payload)
      if not is_again then -- most samples that are submitted again were trained long ago, and wasted nothing
        count('wasted_tokens', one.tokens)
        note_finished(one.tokens)
        count('fenced')
      end
      return 'fenced'
    end
    if not keep_blob(payload, one.bytes) then return 'no payload' end
    if copier then
      call('HSET', key, 'by:' .. i, copier)
    elseif not is_holder then -- the server has lost which holder this token belongs to
      call('HDEL', key, 'by:' .. i)
    end
    if oldest then
      free_segments(g, m, i)
      had_bytes = field(g, 'bytes')
    end
    done = (done or 0) + 1
    call('HSET', key, payload_field, payload, 'bytes:' .. i, one.bytes, 'tokens:' .. i, one.tokens_of_versions,
      'done', done, 'bytes', (had_bytes or 0) + one.bytes)
    if not is_holder then call('HSET', key, token_field, token) end
    note_newest(g, newest, newest_now)
    if had_from ~= from then
      call('HSET', key, 'step:' .. i, from)
      refloor(g)
    end
    if done == tonumber(size) then
      call('ZREM', OPEN, g)
      make_ready(g, field(g, 'floor'), size)
    end
    note_finished(one.tokens)
    accepted[#accepted + 1] = m
    bytes_accepted, tokens_accepted = bytes_accepted + one.bytes, tokens_accepted + one.tokens
    return 'accepted'
  end

  -- Checks the submission that begins at ARGV[a]. All are checked before anything is written. The payload's name
  -- contains member and token, so no worker can name the blob of another sample.
  local function check(a)
    local m, token, shard = ARGV[a], text(a + 1, 'token', 200), text(a + 2, 'shard', 12)
    local g, round, i = sample(a)
    if token == '' or string.find(token, ':', 1, true) then refuse('token') end
    if shard ~= '' and not string.match(shard, '^%d+/$') then refuse('shard') end
    local bytes, tokens, oldest, versions = measures(a + 3)
    local payload = shard .. 'payload:' .. m .. ':' .. token
    return { m = m, g = g, round = round, i = i, token = token, payload = payload, bytes = bytes, tokens = tokens,
      oldest = oldest, versions = versions, tokens_of_versions = string.sub(ARGV[a + 3], 5) }
  end

  local submissions, outcomes = {}, {}
  for a = 2, #ARGV, 4 do submissions[#submissions + 1] = check(a) end
  for b, one in ipairs(submissions) do outcomes[b] = submit(one) end
  for length, n in pairs(finished) do tally('finished_by_response_length', length, n) end
  if #accepted > 0 then
    if call('ZREM', LEASES, unpack(accepted)) < #accepted then call('ZREM', RETRY, unpack(accepted)) end
    count('payload_bytes', bytes_accepted)
    count('generated_tokens', tokens_accepted)
  end
  return outcomes
end)
