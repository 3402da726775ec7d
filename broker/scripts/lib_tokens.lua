-- Tokens of leases. A token proves that the run gave this lease, even to a server that has forgotten the lease: the
-- proof is made with P, which contains a secret.
local function proof(m, nonce, server)
  return string.sub(redis.sha1hex(table.concat({ P, server, nonce, m }, ' ')), 1, 24)
end
local function token_of(m, nonce)
  local server = string.sub(server_id(), 1, 8)
  return nonce .. '.' .. server .. '.' .. proof(m, nonce, server)
end

-- Returns nil if this is no token of this sample; else true if another server process gave it, false if this one did.
local function is_of_before(m, token)
  local nonce, server, proven = string.match(token, '^(%w+)%.(%x+)%.(%x+)$')
  if not nonce or proof(m, nonce, server) ~= proven then return nil end
  return server ~= string.sub(server_id(), 1, 8)
end
