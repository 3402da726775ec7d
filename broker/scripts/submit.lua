-- include: lib_base lib_arguments lib_samples lib_tokens
-- flags: allow-oom
-- submit(is again, {member, token, payload, bytes, n, tokens by step, oldest step, {incarnation, its newest step}...}...)
--   -> {outcome...}; n is how many arguments follow it. Tokens by step are `STEP:TOKENS STEP:TOKENS...`.
-- Accepts finished samples, whose payloads the worker has SET (with a TTL) just before, under keys of their own. The
-- first finished sample of a round wins. A worker that lost the lease, writes for an earlier round, or used weights of
-- an abandoned branch is fenced, and its payload freed.
-- A sample that is submitted again (`is again` = 1) was accepted once by a server that may since have lost it and its
-- lease. It is accepted in its round if the run gave its token for this sample and its tokens are within the bound: an
-- older one would have its whole group generated anew. It takes a sample from another holder only on a server that has
-- restarted. A copy of a lease is as good as the lease.
-- Weights that no worker can have are a strike against the holder, and so are weights older than those of its lease.
-- Touches: meta, tally, leases, retry, open, ready, group:*, segments:*, payload:* (PERSIST, UNLINK), strikes, quarantined,
-- dead.
local is_again = ARGV[1] == '1'
local accepted, bytes_accepted, tokens_accepted, finished = {}, 0, 0, {}

local function note_finished(tokens)
  local length = length_class(tokens)
  finished[length] = (finished[length] or 0) + 1
end

local function may_take(m, token)
  local is_before = is_of_before(m, token)
  return is_before or (is_before == false and not call('ZSCORE', LEASES, m))
end

-- Carries out the submission whose arguments are ARGV[a] to ARGV[last], and returns its outcome.
local function submit(a, last)
  local m, token, payload, bytes = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3]
  local tokens, from = tokens_by_step(a + 5), ARGV[a + 6]
  local newest_now, is_void = newest_of(a + 7, last)
  local g, round, i = parse(m)
  local key = group_key(g)
  local had_round, state, had_token, had_payload, had_from, by, oldest, newest, size, done, had_bytes, floor =
    fields(g, 'round', 'state', 'token:' .. i, 'payload:' .. i, 'step:' .. i, 'by:' .. i, 'oldest:' .. i, 'newest',
      'size', 'done', 'bytes', 'floor')
  local copied_from, copier = copy_of(m, token)
  local mine = had_round == round and (had_token == token or (copier and not had_payload)
    or (is_again and may_take(m, token)))
  local holder = copier or (had_token == token and by) or nil
  if mine and had_payload then
    -- The same payload comes again, as its reply was lost: SET has put a time to live on it, which must go.
    if had_payload == payload then keep_blob(payload) else free_blob(payload) end
    return 'duplicate'
  end
  if mine and is_impossible(newest_now) and not is_again then
    blame(m, holder, 'tokens of weights ' .. newest_now .. ', which were never announced')
    is_void = true
  elseif mine and had_token == token and is_older_than_lease(tonumber(from), had_from, told_by(token), a + 7, last) then
    blame(m, holder, 'tokens of step ' .. from .. ' under a lease for weights of step ' .. had_from)
    is_void = true
  end
  is_void = is_void or (copied_from and tonumber(from) < tonumber(copied_from))
  is_void = is_void or (mine and not is_again and holder and is_barred(g, i, holder))
  is_void = is_void or (had_token ~= token and is_over_bound(tonumber(from)))
  if mine and is_void and state == 'open' and had_token == token then hand_back_anew(g, m, i, oldest) end
  if not mine or is_void or state ~= 'open' then
    free_blob(payload)
    if not is_again then -- most samples that are submitted again were trained long ago, and wasted nothing
      count('wasted_tokens', tokens)
      note_finished(tokens)
      count('fenced')
    end
    return 'fenced'
  end
  if not keep_blob(payload, bytes) then return 'no payload' end
  if copier then
    call('HSET', key, 'by:' .. i, copier)
  elseif had_token ~= token then -- the server has lost which holder this token belongs to
    call('HDEL', key, 'by:' .. i)
  end
  if oldest then
    free_segments(g, m, i)
    had_bytes = field(g, 'bytes')
  end
  done = (done or 0) + 1
  local set = { 'payload:' .. i, payload, 'bytes:' .. i, bytes, 'done', done, 'bytes', (had_bytes or 0) + bytes,
    'tokens:' .. i, ARGV[a + 5] }
  local function also(name, value) set[#set + 1], set[#set + 2] = name, value end
  if had_token ~= token then also('token:' .. i, token) end
  if had_from ~= from then also('step:' .. i, from) end
  call('HSET', key, unpack(set))
  note_newest(g, newest, newest_now)
  if had_from ~= from then floor = refloor(g) end
  if done == tonumber(size) then
    call('ZREM', OPEN, g)
    make_ready(g, floor)
  end
  note_finished(tokens)
  accepted[#accepted + 1], bytes_accepted, tokens_accepted = m, bytes_accepted + bytes, tokens_accepted + tokens
  return 'accepted'
end

-- Checks the submission that begins at ARGV[a]; all are checked before anything is written. Returns the place of its
-- last argument.
local function check(a)
  sample(a)
  blob(a + 2, 'payload', ARGV[a], text(a + 1, 'token', 200))
  whole(a + 3, 'bytes', 1, 2147483647)
  tokens_by_step(a + 5)
  local last = a + 4 + whole(a + 4, 'arguments', 4, 10000)
  versions(a + 6, last)
  return last
end

local outcomes, a = {}, 2
while a <= #ARGV do a = check(a) + 1 end
a = 2
while a <= #ARGV do
  local last = a + 4 + ARGV[a + 4]
  outcomes[#outcomes + 1] = submit(a, last)
  a = last + 1
end
for length, n in pairs(finished) do tally('finished_by_response_length', length, n) end
if #accepted > 0 then
  if call('ZREM', LEASES, unpack(accepted)) < #accepted then call('ZREM', RETRY, unpack(accepted)) end
  count('payload_bytes', bytes_accepted)
  count('generated_tokens', tokens_accepted)
end
return outcomes
