# What RESULTS.md tells of GPUs, on a machine with four of them, several measurements side by side:
#
#   make -k -j -f benchmarks/four_gpus.mk OUTPUT=DIR SMOLLM2=DIR [PYTHON=python3] first|second|third
#
# SMOLLM2 is SmolLM2-135M-Instruct (see benchmarks.learns.model). Each measurement has GPUs and a limit, and leaves its
# result in OUTPUT/NAME.json (of tests: .txt) and its words in NAME.log. One whose result is there is not made again.
# `first` and `second` take less than ten minutes each, `third` eight; they come in this order. What stands behind a "|"
# only goes first: it may have failed.
PYTHON ?= python3
D := $(abspath $(OUTPUT))
$(shell mkdir -p $(D))

comma := ,
PAIR := 0,1
ALL := 0,1,2,3

# $(call measure,GPUs,seconds,arguments of Python): the last line that it prints is its result.
# It ends itself a little before its limit where it starts processes that would outlive it.
measure = -CUDA_VISIBLE_DEVICES=$(1) timeout -k 20 $(2) $(PYTHON) $(3) > $(basename $@).out 2> $(basename $@).log \
	&& tail -n 1 $(basename $@).out > $@
tests = -CUDA_VISIBLE_DEVICES=$(1) timeout -k 20 $(2) $(PYTHON) -m pytest -q -p no:cacheprovider $(3) \
	> $(basename $@).log 2>&1 && tail -n 1 $(basename $@).log > $@
sync = -m benchmarks.weight_sync --output $(basename $@)
learns = -m benchmarks.learns weights.transport=nccl weights.staging=device
smollm2 = $(learns) --model $(SMOLLM2) --output $(D)/smollm2
asynchrony = -m benchmarks.asynchrony --model $(SMOLLM2) --output $(D)/asynchrony

.PHONY: first second third
first: $(addprefix $(D)/,sync.json sync_moe.json warm_up.json long_tailed.json engines.txt worker.json agreement.json)
second: $(addprefix $(D)/,grpo.json megatron.json faults.txt asynchronous.json sync_sharded.json)
third: $(addprefix $(D)/,separated.json colocated.json)

$(D)/sync.json:
	$(call measure,$(PAIR),400,$(sync) --native --versions 7)
$(D)/sync_moe.json: | $(D)/sync.json
	$(call measure,$(PAIR),180,$(sync) --limit-s 170 --shape moe-2.4b --kv-policy keep)

$(D)/warm_up.json:
	$(call measure,2,180,$(smollm2) --timeout-s 165 --parts sft)
$(D)/long_tailed.json: | $(D)/warm_up.json
	$(call measure,2,180,$(asynchrony) --timeout-s 165 --runs "")
$(D)/engines.txt: | $(D)/long_tailed.json
	$(call tests,2,220,tests/rollout_workers/test_engine_contract.py -k vllm)

$(D)/worker.json:
	$(call measure,3,380,-m benchmarks.worker_overhead --seconds 30)
$(D)/agreement.json: | $(D)/worker.json
	$(call measure,3,200,-m benchmarks.agreement --shape qwen3-0.6b --engine vllm)

# Side by side on the same GPUs, where each of the three needs little.
$(D)/grpo.json: $(D)/warm_up.json
	$(call measure,$(ALL),320,$(smollm2) --timeout-s 300 --parts grpo --gpus 4 --learner-gpus 2 engine.options.gpu_memory_utilization=0.3)
$(D)/megatron.json:
	$(call measure,$(ALL),320,$(learns) --timeout-s 150 --recipe arithmetic-vllm.yaml --output $(D)/megatron --parts sft$(comma)grpo \
		--gpus 4 --learner-gpus 2 learner.backend=megatron learner.layout.expert=2 learner.device=cuda \
		engine.device=cuda engine.options.gpu_memory_utilization=0.2)
$(D)/faults.txt:
	$(call tests,$(ALL),300,tests/weightsync/test_gpu.py tests/weightsync/test_faults.py -k 'nccl or gpu')

$(D)/asynchronous.json: $(D)/long_tailed.json | $(D)/grpo.json $(D)/megatron.json $(D)/faults.txt
	$(call measure,$(ALL),180,$(asynchrony) --timeout-s 165 --runs asynchronous --steps 30)
$(D)/sync_sharded.json: | $(D)/asynchronous.json
	$(call measure,$(ALL),150,$(sync) --limit-s 140 --shape moe-2.4b --learner-gpus 2 --engine-gpus 2)
$(D)/separated.json: $(D)/long_tailed.json
	$(call measure,$(ALL),200,$(asynchrony) --timeout-s 185 --runs separated --steps 18)
$(D)/colocated.json: $(D)/long_tailed.json | $(D)/separated.json
	$(call measure,$(ALL),300,$(asynchrony) --timeout-s 285 --runs colocated --steps 16 \
		--of colocated engine.options.gpu_memory_utilization=0.7)
