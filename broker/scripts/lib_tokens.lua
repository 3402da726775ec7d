-- Tokens of leases. One proves that the run gave this lease, even to a server that has forgotten it.
local function proof(m, nonce, server) return string.sub(redis.sha1hex(table.concat({ P, server, nonce, m }, ' ')), 1, 24) end
local function token_of(m, nonce)
  local server = string.sub(server_id(), 1, 8)
  return nonce .. '.' .. server .. '.' .. proof(m, nonce, server)
end

-- nil where it is no token of this sample, else whether a server gave it that is not the one of now.
local function is_of_before(m, token)
  local nonce, server, proven = string.match(token, '^(%w+)%.(%x+)%.(%x+)$')
  if not nonce or proof(m, nonce, server) ~= proven then return nil end
  return server ~= string.sub(server_id(), 1, 8)
end
