-- Tokens of leases. A token proves that the run gave this lease, even to a server that has forgotten the lease: the
-- proof is made with a key, and the key with P, which contains a secret. The leases of one call have one key: a digest
-- of key and member is of one block, half as dear as a digest of all parts.
local function proof_key(nonce, server)
  return string.sub(redis.sha1hex(P .. ' ' .. server .. ' ' .. nonce), 1, 32)
end
local function proof(m, key) return string.sub(redis.sha1hex(key .. m), 1, 24) end
-- Returns the function that makes a member's token under this nonce.
local function tokens_under(nonce)
  local server = string.sub(server_id(), 1, 8)
  local beginning, key = nonce .. '.' .. server .. '.', proof_key(nonce, server)
  return function(m) return beginning .. proof(m, key) end
end

-- Returns nil if this is no token of this sample; else true if another server process gave it, false if this one did.
local function is_of_earlier_server(m, token)
  local nonce, server, proven = string.match(token, '^(%w+)%.(%x+)%.(%x+)$')
  if not nonce or proof(m, proof_key(nonce, server)) ~= proven then return nil end
  return server ~= string.sub(server_id(), 1, 8)
end

-- The nonce of a lease says for which incarnation's weights it was given, and when (in ms, by the server's clock).
local function nonce_of_lease(nonce, incarnation)
  return nonce .. 'x' .. incarnation .. 'x' .. string.format('%.0f', 1000 * now())
end
-- Returns the incarnation and the time in seconds, or nothing for another token.
local function parse_lease_token(token)
  local incarnation, ms = string.match(token or '', '^%x+x(%d+)x(%d+)%.')
  return incarnation, ms and ms / 1000
end
-- Returns true if a sample has tokens of older weights (`oldest`) than its lease was given for (`from`), under this
-- token. A worker's weights become older only with a later incarnation; the sample's are {incarnation, step}...
local function is_older_than_lease(oldest, from, token, versions)
  if not from or oldest >= tonumber(from) then return false end
  local under = parse_lease_token(token)
  if not under then return false end
  for b = 1, #versions, 2 do
    if versions[b] > tonumber(under) and versions[b] <= number('incarnation') then return false end
  end
  return true
end
-- Returns when a sample was leased, or got its last tokens; `since` is when segments brought it some.
local function last_progress(token, since) return tonumber(since or '') or select(2, parse_lease_token(token)) end

-- A holder without its name and session, which are secret.
local function digest_of(holder)
  return string.match(holder, '^%? (%x+)$') or string.sub(redis.sha1hex(P .. holder), 1, 16)
end

-- A copy is a lease of a sample beside another worker's. It excludes no worker, so nothing is stored of it: its nonce
-- says for which weights it was given, and to whom.
local function nonce_of_copy(incarnation, step, holder)
  return table.concat({ 'copy', incarnation, 'x', step, 'x', digest_of(holder) })
end
-- Returns the step and the holder of a copy if this is the token of one of this sample, else nil.
local function copy_of(m, token)
  local step, digest = string.match(token, '^copy%d+x(%d+)x(%x+)%.')
  if not step or is_of_earlier_server(m, token) == nil then return nil end
  return step, '? ' .. digest
end

-- Renews leases for ARGV[a] seconds, also expired ones that no other worker has taken, but none that had no new segment
-- for `lease_hold_s`. ARGV[a + 1] and the following ones are their members and tokens. Returns the tokens of leases
-- that the caller has lost.
local function renew_leases(a)
  local time, lost = now(), {}
  local deadline, earliest = time + seconds(a, limit('lease_ttl_s', 3600)), time - limit('lease_hold_s', 86400)
  for b = a + 1, #ARGV, 2 do
    local m, token = ARGV[b], text(b + 1, 'token', 200)
    local g, round, i = sample(b)
    local had = call('HMGET', group_key(g), 'round', 'token:' .. i, 'payload:' .. i, 'state', 'since:' .. i)
    local is_wanted = had[1] == round and not had[3] and had[4] == 'open'
    if is_wanted and had[2] == token and (last_progress(had[2], had[5]) or time) >= earliest then
      call('ZADD', LEASES, deadline, m)
      call('ZREM', RETRY, m)
    elseif not (is_wanted and copy_of(m, token)) then
      lost[#lost + 1] = token
    end
  end
  return lost
end

-- Holders whose samples were trained have standing, as long as they ask for leases.
local STANDING, STANDING_S = P .. 'standing', 600
local function has_standing(holder)
  if call('ZSCORE', STANDING, holder) then return true end
  local digest = digest_of(holder)
  for _, other in ipairs(call('ZRANGE', STANDING, 0, -1)) do
    if digest_of(other) == digest then return true end
  end
  return false
end
-- Returns whether such a holder lives: its last report has not expired. Its session lasts for longer.
local function is_any_with_standing_alive()
  for _, holder in ipairs(call('ZRANGE', STANDING, 0, -1)) do
    local worker, session = string.match(holder, '^(%w[%w._-]*) (%w+)$')
    local is_ours = worker and call('GET', P .. 'session:' .. worker) == session
    if is_ours and call('EXISTS', P .. 'worker:' .. worker) == 1 then return true end
  end
  return false
end
-- A sample that was refused once is accepted only from holders with standing, while any of them is alive: else a
-- program that begins again under new names could spoil it for ever.
local function is_barred(g, i, holder)
  return is_any_refused() and call('SISMEMBER', REFUSED, g .. ':' .. i) == 1 and not has_standing(holder)
    and is_any_with_standing_alive()
end
