-- include: lib_base lib_tokens
-- flags: no-writes allow-oom
-- progress() -> {seconds by this server's clock, meta, newest step with a batch | '', groups of that batch,
--   is a learner alive, floor of the youngest group that the next step would train | '',
--   {group, size, done, floor | '', {sample, its holder | '', held since | '', is leased}...}...}
-- Looks at the oldest unfinished groups, and at the first of their missing samples only: a display calls it often.
-- Reads: meta, pinned, batch:*, ready, open, retry, leases, group:*, holder.
local MOST_GROUPS, MOST_SAMPLES, MOST_RETRIES = 4, 16, 64
local pinned = call('ZRANGE', P .. 'pinned', -1, -1)[1]

-- Returns the groups that were begun, those of the oldest weights first, then those that wait for their first lease.
local function unfinished()
  local names, seen = {}, {}
  local function add(g)
    if #names < MOST_GROUPS and not seen[g] then seen[g], names[#names + 1] = true, g end
  end
  for _, g in ipairs(call('ZRANGE', OPEN, 0, MOST_GROUPS - 1)) do add(g) end
  for _, m in ipairs(call('ZRANGE', RETRY, 0, MOST_RETRIES - 1)) do add((parse(m))) end
  return names
end

-- Returns {sample, holder, since, is leased}; the holder without its session, which is secret.
local function missing(m, i, by, since)
  return { i, name_of(by or ''), since and string.format('%.3f', since) or '', call('ZSCORE', LEASES, m) and 1 or 0 }
end

local function described(g)
  local had = call('HMGET', group_key(g), 'size', 'done', 'floor', 'round')
  local size = tonumber(had[1] or '') or 0
  local found = { g, size, tonumber(had[2] or '') or 0, had[3] or '' }
  if size == 0 then return found end
  local by, since, tokens = by_sample(g, 'by', size), by_sample(g, 'since', size), by_sample(g, 'token', size)
  for a, payload in ipairs(by_sample(g, 'payload', size)) do
    if not payload and #found < 4 + MOST_SAMPLES then
      found[#found + 1] = missing(member(g, had[4], a - 1), a - 1, by[a], moved_at(tokens[a], since[a]))
    end
  end
  return found
end

local per_step = tonumber(call('HMGET', META, 'groups_per_step')[1] or '') or 1
local youngest = call('ZRANGE', READY, per_step - 1, per_step - 1, 'WITHSCORES')[2]
local reply = { string.format('%.3f', now()), call('HGETALL', META), pinned or '',
  pinned and call('LLEN', P .. 'batch:' .. pinned) or 0, call('GET', PUBLIC .. 'holder') and 1 or 0, youngest or '' }
for _, g in ipairs(unfinished()) do reply[#reply + 1] = described(g) end
return reply
