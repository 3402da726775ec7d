-- Evaluations: workers that hold exactly one version of the weights sample held-out prompts with it. These samples are
-- in no queue of the training's samples and in none of its counters. Version V has the hash `evaluation:V` and the
-- zsets `evaluating:V` and `begun:V` (see broker/keys.py); its prompts lie under `prompt:evaluation:V:N`.
local EVALUATIONS = P .. 'evaluations'

local function evaluation_key(version) return P .. 'evaluation:' .. version end
local function evaluating_key(version) return P .. 'evaluating:' .. version end
local function begun_key(version) return P .. 'begun:' .. version end
local function evaluation_prompt(version, n) return PROMPT .. 'evaluation:' .. version .. ':' .. n end

-- Frees all keys of an evaluation.
local function forget_evaluation(version)
  local size, samples = unpack(call('HMGET', evaluation_key(version), 'size', 'samples'))
  for n = 0, (size or 0) / (samples or 1) - 1 do call('UNLINK', evaluation_prompt(version, n)) end
  call('UNLINK', evaluation_key(version), evaluating_key(version), begun_key(version))
  call('SREM', EVALUATIONS, version)
end

-- A sample that was leased so long ago, for the first time, and is not done, is given to any worker that asks for it,
-- whoever holds it: its first result counts. A worker keeps a version for `keep` seconds, of which this is a part.
local COPIED_AFTER = 0.25

-- Returns whether a sample has been under way for this part of the time for which workers keep the version.
local function is_begun(version, i, keep, part)
  local begun = call('ZSCORE', begun_key(version), i)
  return begun and now() > begun + part * keep or false
end

-- Returns {holder, is it alive under its name} of ARGV[a], `worker session`. Only living workers get copies.
local function evaluator(a)
  local worker, session = string.match(text(a, 'holder', 200), '^(%w[%w._-]*) (%w+)$')
  if not worker then refuse('holder') end
  local owner = call('GET', P .. 'session:' .. worker)
  return (owner or session) == session and ARGV[a] or worker .. '? ' .. session, owner == session
end

-- Returns the token of a holder's copy of a sample. It contains the run's secret, so nobody can guess that of another.
local function copy_token(version, holder, i) return redis.sha1hex(evaluation_key(version) .. ' ' .. holder .. ' ' .. i) end

-- Frees all evaluations: workers that a new learner finds cannot have its weights yet.
local function forget_evaluations()
  for _, version in ipairs(call('SMEMBERS', EVALUATIONS)) do forget_evaluation(version) end
end
