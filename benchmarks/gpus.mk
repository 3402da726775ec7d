# Part of what RESULTS.md tells of GPUs, on a machine with four of them or two, several measurements side by side:
#
#   make -k -j -f benchmarks/gpus.mk [GPUS=2] OUTPUT=DIR SMOLLM2=DIR [PYTHON=python3] first|second|third
#
# SMOLLM2 is SmolLM2-135M-Instruct (see benchmarks.learns.model). Each measurement has GPUs and a limit, and leaves its
# result in OUTPUT/NAME.json (of tests: .txt) and its words in NAME.log. One whose result is there is not made again.
# On four GPUs each of the three takes about ten minutes, whatever the other two left. What stands behind a "|" only goes
# first: it may have failed.
GPUS ?= 4
PYTHON ?= python3
D := $(abspath $(OUTPUT))
$(shell mkdir -p $(D))

comma := ,
PAIR := 0,1
ifeq ($(GPUS),2)
SEVERAL := $(PAIR)
ALL := $(PAIR)
THIRD := 0
LAST := 1
several = --gpus 2
learning = --gpus 2
# Learner and engines share them where each has more than one, and what has GPUs of its own on four goes later.
sharing = --gpus 2 --learner-gpus 2 workers.count=2 workers.devices=[$(ALL)] weights.transport=ipc weights.staging=host
share = --share
after = | $(1)
else
SEVERAL := 0,1,2
ALL := 0,1,2,3
THIRD := 2
LAST := 3
several = --gpus 3
learning = --gpus 4 --learner-gpus 2
sharing = $(learning) $(nccl)
share =
after =
endif

# $(call measure,GPUs,seconds,arguments of Python): the last line that it prints is its result.
# It ends itself a little before its limit where it starts processes that would outlive it.
measure = -CUDA_VISIBLE_DEVICES=$(1) timeout -k 20 $(2) $(PYTHON) $(3) > $(basename $@).out 2> $(basename $@).log \
	&& tail -n 1 $(basename $@).out > $@
tests = -CUDA_VISIBLE_DEVICES=$(1) timeout -k 20 $(2) $(PYTHON) -m pytest -q -p no:cacheprovider $(3) \
	> $(basename $@).log 2>&1 && tail -n 1 $(basename $@).log > $@
nccl = weights.transport=nccl weights.staging=device
sync = -m benchmarks.weight_sync --output $(basename $@)
smollm2 = -m benchmarks.learns --model $(SMOLLM2) --output $(D)/smollm2
megatron = -m benchmarks.learns --recipe arithmetic-vllm.yaml --output $(D)/megatron $(sharing) learner.backend=megatron \
	learner.layout.expert=2 learner.device=cuda engine.device=cuda engine.options.gpu_memory_utilization=0.2
asynchrony = -m benchmarks.asynchrony $(several) --model $(SMOLLM2) --output $(D)/asynchrony
faults = tests/weightsync/test_faults.py

.PHONY: first second third
first: $(addprefix $(D)/,grpo.json megatron.json faults.txt more_faults.txt)
second: $(addprefix $(D)/,asynchronous.json separated.json colocated.json worker.json)
third: $(addprefix $(D)/,sync.json engines.txt agreement_moe.json agreement.json scorers.json sync_moe.json sync_ipc.json sync_sharded.json)

# All warm-ups and faults at once, then both runs that learn at once: each needs little. An engine does not start beside
# a process that gives memory back.
$(D)/warm_up.json:
	$(call measure,0,180,$(smollm2) --timeout-s 165 --parts sft)
$(D)/megatron_warm_up.json:
	$(call measure,$(ALL),180,$(megatron) --timeout-s 165 --parts sft)
$(D)/faults.txt:
	$(call tests,$(ALL),160,$(faults) tests/weightsync/test_gpu.py tests/weightsync/test_hosts.py -k 'gpu or nccl and not killed_and_stopped')
$(D)/more_faults.txt:
	$(call tests,$(ALL),160,$(faults) -k 'nccl and killed_and_stopped')
FAULTS := $(addprefix $(D)/,faults.txt more_faults.txt)
$(D)/grpo.json: $(D)/warm_up.json | $(D)/megatron_warm_up.json $(FAULTS)
	$(call measure,$(ALL),330,$(smollm2) --timeout-s 315 --parts grpo $(learning) $(nccl) engine.options.gpu_memory_utilization=0.3)
$(D)/megatron.json: $(D)/megatron_warm_up.json | $(D)/warm_up.json $(FAULTS)
	$(call measure,$(ALL),330,$(megatron) --timeout-s 315 --parts grpo)

# Of four GPUs three are for asynchrony, one for what a worker costs.
$(D)/long_tailed.json:
	$(call measure,0,180,$(asynchrony) --timeout-s 165 --runs "")
$(D)/asynchronous.json: $(D)/long_tailed.json
	$(call measure,$(SEVERAL),180,$(asynchrony) --timeout-s 165 --runs asynchronous --steps 30)
$(D)/separated.json: $(D)/long_tailed.json | $(D)/asynchronous.json
	$(call measure,$(SEVERAL),200,$(asynchrony) --timeout-s 185 --runs separated --steps 18)
$(D)/colocated.json: $(D)/long_tailed.json | $(D)/separated.json
	$(call measure,$(SEVERAL),220,$(asynchrony) --timeout-s 205 --runs colocated --steps 16 \
		--of colocated engine.max_concurrent=256 engine.options.gpu_memory_utilization=0.7)
$(D)/worker.json: $(call after,$(D)/colocated.json)
	$(call measure,$(LAST),540,-m benchmarks.worker_overhead --seconds 25)

$(D)/sync.json:
	$(call measure,$(PAIR),400,$(sync) --native --versions 12)
$(D)/engines.txt: $(call after,$(D)/sync_ipc.json)
	$(call tests,$(THIRD),300,tests/rollout_workers/test_engine_contract.py -k vllm)
$(D)/agreement_moe.json: $(call after,$(D)/sync_ipc.json)
	$(call measure,$(LAST),300,-m benchmarks.agreement --shape moe-2.4b --layers 4 --engine vllm)
$(D)/agreement.json: | $(D)/agreement_moe.json
	$(call measure,$(LAST),200,-m benchmarks.agreement --shape qwen3-0.6b --engine vllm)
$(D)/scorers.json: | $(D)/agreement.json
	$(call measure,$(LAST),300,-m benchmarks.scorers --shape qwen3-0.6b --dtype float32 --groups 64 --response-tokens 256 \
		--timeout-s 140)
$(D)/sync_moe.json: | $(D)/sync.json
	$(call measure,$(PAIR),180,$(sync) --limit-s 170 --shape moe-2.4b --kv-policy keep)
$(D)/sync_ipc.json: | $(D)/sync_moe.json
	$(call measure,$(PAIR),150,$(sync) --limit-s 140 --shape moe-2.4b --transport ipc --learner-gpus 2 --engine-gpus 2)
$(D)/sync_sharded.json: | $(D)/sync_ipc.json $(D)/engines.txt $(D)/scorers.json
	$(call measure,$(ALL),200,$(sync) --limit-s 190 --shape moe-2.4b --learner-gpus 2 --engine-gpus 2 $(share))
