-- Evaluations: workers that hold exactly one version of the weights sample held-out prompts with it. These samples are
-- in no queue of the training's samples and in none of its counters. Version V has the hash `evaluation:V` and the zset
-- `evaluating:V` (see broker/keys.py); its prompts lie under `prompt:evaluation:V:N`.
local EVALUATIONS = P .. 'evaluations'

local function evaluation_key(version) return P .. 'evaluation:' .. version end
local function evaluating_key(version) return P .. 'evaluating:' .. version end
local function evaluation_prompt(version, n) return PROMPT .. 'evaluation:' .. version .. ':' .. n end

-- Frees all keys of an evaluation.
local function forget_evaluation(version)
  local size, samples = unpack(call('HMGET', evaluation_key(version), 'size', 'samples'))
  for n = 0, (size or 0) / (samples or 1) - 1 do call('UNLINK', evaluation_prompt(version, n)) end
  call('UNLINK', evaluation_key(version), evaluating_key(version))
  call('SREM', EVALUATIONS, version)
end

-- Frees all evaluations: workers that a new learner finds cannot have its weights yet.
local function forget_evaluations()
  for _, version in ipairs(call('SMEMBERS', EVALUATIONS)) do forget_evaluation(version) end
end
