"""TRL's and verl's names for a recipe's keys, and what differs. The guide for their users shows these pairs in tables.

A name is the last of a key's path, or as much of the path as tells it from other keys: `rollout.n`. A name of a section
stands for all of its keys that have no longer name here: `critic`, beside `critic.optim.lr`.
"""

from typing import NamedTuple


class OurKey(NamedTuple):
    """Headway's answer to a key of TRL or verl."""

    key: str = ""
    """Headway's own key; empty: there is none."""
    remark: str = ""
    """A sentence on what differs, or on why there is no key."""


VERL_SECTIONS = ("actor_rollout_ref", "async_training", "critic", "data", "reward", "reward_model", "trainer")
"""verl's sections of which Headway has none; `algorithm` is a section of both."""
GROUPS = ("fsdp_config", "megatron", "policy_loss")
"""Sections of verl whose sentence answers only those of their keys whose names have no answer of their own. The keys of
other sections mean something else than those of the same names elsewhere: `val_kwargs.top_p` is not `top_p`."""

UPDATES = "TRL counts updates, Headway steps of learner.updates_per_step updates each."
DEVICES = "The learner's GPUs on all machines; those of the engines are workers.devices."
MICRO_BATCH = "It counts the packed tokens of one pass, where verl's micro-batch counts samples."
NEVER_CUT = "No prompt is cut: one that leaves no room for a response in engine.max_model_len is passed over."
IN_TURNS = "Parameters leave the GPUs only in turns, with run.placement=colocated."
OWN_CODE = "Headway never runs code from a model's directory."
PACKED = "Batches are always packed without padding."
ONCE = "Each sample is trained once."
KERNELS = "Headway chooses kernels itself; learner.compute.compile compiles layers."
CHAT = "A file of your own, with these values written into it. The column chat_template_kwargs has those of a row."
FIXED_ENTROPY = "algorithm.entropy_coefficient is fixed: there is no adaptive one."
STARTS_ENGINES = "`headway run` starts the engines; `headway workers` does on other machines."
EPOCHS = "learner.steps, 100 by default, still ends the run if it comes first."
SINKS = "[{kind: jsonl}, {kind: wandb}]: jsonl is required; tensorboard, mlflow, trackio and prometheus are others."
EPISODES = "A class plays episodes of several turns or with tools: environment.kind=package.module:Class."
REWARD_MODEL = "A reward model is one of the rewards: {kind: reward_model, path: DIRECTORY}."

OF_VERL = {
    "_target_": OurKey(remark="It names a class of verl's configuration; a recipe has no such key."),
    # data
    "train_files": OurKey("prompts.path", "One file, with prompts.kind=parquet."),
    "val_files": OurKey("prompts.options.held_out_path", "evaluation.prompts says how many of its prompts are asked."),
    "prompt_key": OurKey("prompts.options.prompt_field"),
    "train_batch_size": OurKey("learner.groups_per_step", "Both count prompts."),
    "gen_batch_size": OurKey(
        remark="Prompts are taken one by one; staleness.ahead says how many steps are begun ahead."
    ),
    "val_batch_size": OurKey(remark="An engine takes as many requests of an evaluation as it has room for."),
    "max_prompt_length": OurKey("engine.max_model_len", "It counts prompt and response: the sum of verl's two."),
    "prompt_length": OurKey("engine.max_model_len", "It counts prompt and response: the sum of verl's two."),
    "max_response_length": OurKey("sampling.max_new_tokens"),
    "response_length": OurKey("sampling.max_new_tokens"),
    "filter_overlong_prompts": OurKey(remark=NEVER_CUT),
    "truncation": OurKey(remark=NEVER_CUT),
    "seed": OurKey("run.seed"),
    "data.shuffle": OurKey("prompts.shuffle"),
    "data.tokenizer": OurKey(remark="The tokenizer is the one in model.path."),
    "custom_cls": OurKey("prompts.kind", "Your own source is package.module:Class."),
    "apply_chat_template_kwargs": OurKey("model.chat_template", CHAT),
    "reward_fn_key": OurKey(remark="A reward is given the row's data_source; rewards are chosen by `rewards` alone."),
    "return_raw_chat": OurKey(remark="A reward is given the rendered text and the row's columns, always."),
    "train_max_samples": OurKey(remark="All rows of the file are read: cut the file."),
    "val_max_samples": OurKey("evaluation.prompts"),
    "image_key": OurKey(remark="Headway trains on text alone."),
    # actor_rollout_ref.model
    "model.path": OurKey("model.path"),
    "tokenizer_path": OurKey(remark="The tokenizer is the one in model.path."),
    "trust_remote_code": OurKey(remark=OWN_CODE),
    "external_lib": OurKey(remark=OWN_CODE),
    "override_config": OurKey(remark="The model's configuration is the one in model.path."),
    "hf_config_path": OurKey(remark="The model's configuration is the one in model.path."),
    "lora_adapter_path": OurKey(remark="An adapter starts anew: merge an old one into the model first."),
    "custom_chat_template": OurKey("model.chat_template", "It names a file, where verl's is the template itself."),
    "use_remove_padding": OurKey(remark=PACKED),
    "enable_gradient_checkpointing": OurKey("learner.compute.recompute", "True is `full`; the default is `none`."),
    "enable_activation_offload": OurKey(remark="Activations stay on the GPU, or learner.compute.recompute drops them."),
    "use_fused_kernels": OurKey(remark=KERNELS),
    "use_liger": OurKey(remark=KERNELS),
    "lora_rank": OurKey("model.adapter.rank", "0, for none, is model.adapter=null here."),
    "lora_alpha": OurKey("model.adapter.alpha"),
    "target_modules": OurKey("model.adapter.targets", "Leave it out for all linear layers and experts."),
    "lora": OurKey("model.adapter"),
    # actor_rollout_ref.actor and .ref
    "strategy": OurKey("learner.backend", "fsdp (FSDP2) or megatron."),
    "lr": OurKey("optimizer.learning_rate"),
    "lr_scheduler_type": OurKey("optimizer.schedule"),
    "lr_decay_style": OurKey("optimizer.schedule"),
    "lr_warmup_steps": OurKey("optimizer.warmup_steps"),
    "lr_warmup_steps_ratio": OurKey("optimizer.warmup_steps", "It counts steps: the ratio times learner.steps."),
    "min_lr_ratio": OurKey(remark="optimizer.schedule falls to 0, or is constant."),
    "optim.optimizer": OurKey(remark="The optimizer is AdamW."),
    "optim.weight_decay": OurKey("optimizer.weight_decay", "It is 0 by default; verl's is 0.01."),
    "betas": OurKey(
        "optimizer.beta2", "With optimizer.beta1. Headway has 0.9 and 0.95 by default, verl 0.9 and 0.999."
    ),
    "clip_grad": OurKey("optimizer.max_grad_norm"),
    "grad_clip": OurKey("optimizer.max_grad_norm"),
    "ppo_mini_batch_size": OurKey("learner.updates_per_step", "It is train_batch_size / ppo_mini_batch_size."),
    "ppo_micro_batch_size": OurKey("learner.micro_batch_tokens", MICRO_BATCH),
    "ppo_micro_batch_size_per_gpu": OurKey("learner.micro_batch_tokens", MICRO_BATCH),
    "ppo_max_token_len_per_gpu": OurKey(
        "learner.micro_batch_tokens", "With learner.layout.context it counts the tokens of all GPUs of a sequence."
    ),
    "log_prob_micro_batch_size": OurKey("learner.micro_batch_tokens", MICRO_BATCH),
    "log_prob_micro_batch_size_per_gpu": OurKey("learner.micro_batch_tokens", MICRO_BATCH),
    "log_prob_max_token_len_per_gpu": OurKey("learner.micro_batch_tokens", "All passes have the same micro-batches."),
    "use_dynamic_bsz": OurKey(remark=PACKED),
    "log_prob_use_dynamic_bsz": OurKey(remark=PACKED),
    "ppo_epochs": OurKey(remark=ONCE),
    "actor.shuffle": OurKey(remark=ONCE),
    "clip_ratio": OurKey("algorithm.objective.options.clip_low", "And the same as clip_high."),
    "clip_ratio_low": OurKey("algorithm.objective.options.clip_low"),
    "clip_ratio_high": OurKey("algorithm.objective.options.clip_high"),
    "clip_ratio_c": OurKey("algorithm.objective.options.dual_clip", "It is off by default; verl's is 3."),
    "tau_pos": OurKey("algorithm.objective.options.tau_positive"),
    "tau_neg": OurKey("algorithm.objective.options.tau_negative"),
    "policy_loss": OurKey(
        remark="Settings of a loss are algorithm.objective.options; clip_cov, kl_cov and dro have no counterpart."
    ),
    "policy_loss.loss_mode": OurKey(
        "algorithm.preset", "vanilla is grpo, dppo_tv dppo; gspo, sapo and cispo have the same names, others none."
    ),
    "loss_agg_mode": OurKey(
        "algorithm.aggregation.kind",
        "token-mean is token_mean, seq-mean-token-mean sequence_mean, seq-mean-token-sum sequence_sum and"
        " seq-mean-token-sum-norm fixed_denominator.",
    ),
    "loss_scale_factor": OurKey("algorithm.aggregation.options.length", "Of kind fixed_denominator."),
    "entropy_from_logits_with_chunking": OurKey(remark="The output head always works in chunks of tokens."),
    "entropy_from_logits_chunk_size": OurKey(remark="The output head always works in chunks of tokens."),
    "entropy_coeff": OurKey("algorithm.entropy_coefficient"),
    "use_kl_loss": OurKey("algorithm.kl.coefficient", "0 is False; above 0 the penalty is in the loss."),
    "kl_loss_coef": OurKey(
        "algorithm.kl.coefficient", "It alone switches the penalty on: 0 where use_kl_loss is False."
    ),
    "kl_loss_type": OurKey("algorithm.kl.kind", "kl is k1, mse k2 and low_var_kl k3; others have none."),
    "tis_imp_ratio_cap": OurKey("algorithm.corrections", "[{kind: truncated_is, options: {cap: 2.0}}]."),
    "megatron.router_replay": OurKey("algorithm.router_replay"),
    "enable_rollout_routing_replay": OurKey("algorithm.router_replay"),
    "ulysses_sequence_parallel_size": OurKey("learner.layout.context"),
    "use_torch_compile": OurKey("learner.compute.compile", "It compiles the layers."),
    "fsdp_config": OurKey(remark="FSDP2 shards over all learner.processes, and has no further settings."),
    "fsdp_config.dtype": OurKey("model.dtype"),
    "fsdp_config.ulysses_sequence_parallel_size": OurKey("learner.layout.context"),
    "fsdp_config.use_torch_compile": OurKey("learner.compute.compile", "It compiles the layers."),
    "fsdp_config.model_dtype": OurKey(remark="Masters and moments are float32; model.dtype is the passes' format."),
    "optimizer_offload": OurKey("learner.compute.offload_optimizer"),
    "fsdp_config.optimizer_offload": OurKey("learner.compute.offload_optimizer"),
    "fsdp_config.param_offload": OurKey(remark=IN_TURNS),
    "megatron": OurKey(remark="Megatron's settings are those of learner.layout and learner.compute."),
    "megatron.dtype": OurKey("model.dtype"),
    "megatron.optimizer_offload": OurKey(
        remark="Megatron shards the optimizer's state over replicas and context ranks: raise learner.processes."
    ),
    "megatron.param_offload": OurKey(remark=IN_TURNS),
    "megatron.tensor_model_parallel_size": OurKey("learner.layout.tensor"),
    "megatron.pipeline_model_parallel_size": OurKey("learner.layout.pipeline"),
    "megatron.virtual_pipeline_model_parallel_size": OurKey("learner.layout.virtual_pipeline"),
    "megatron.context_parallel_size": OurKey("learner.layout.context"),
    "megatron.expert_model_parallel_size": OurKey("learner.layout.expert"),
    "megatron.expert_tensor_parallel_size": OurKey("learner.layout.expert_tensor"),
    "async_save": OurKey("checkpoint.asynchronous"),
    "checkpoint.save_contents": OurKey(remark="A checkpoint always has all that a resumed run needs."),
    "checkpoint.load_contents": OurKey(remark="A checkpoint always has all that a resumed run needs."),
    # actor_rollout_ref.rollout
    "hybrid_engine": OurKey("run.placement", "True is `colocated`; the default is `separated`."),
    "free_cache_engine": OurKey("run.placement", "With `colocated`, engines sleep while the learner trains."),
    "rollout.name": OurKey("engine.kind", "vllm or sglang."),
    "rollout.mode": OurKey(
        remark="Generation is always asynchronous; with staleness.max_lag=0 it waits for each step."
    ),
    "rollout.n": OurKey("learner.group_size"),
    "rollout.dtype": OurKey("engine.dtype"),
    "rollout.n_gpus_per_node": OurKey("workers.devices", "A list of the engines' GPUs; workers.count is their number."),
    "rollout.nnodes": OurKey(
        remark="On other machines `headway workers` starts the engines; `headway launch` writes scripts."
    ),
    "temperature": OurKey("sampling.temperature"),
    "top_p": OurKey("sampling.top_p"),
    "top_k": OurKey("sampling.top_k", "0, not -1, is all tokens."),
    "do_sample": OurKey(remark="Training always samples. Greedy evaluations are evaluation.temperature=0."),
    "val_kwargs": OurKey(remark="An evaluation samples by `sampling`, but for its temperature."),
    "val_kwargs.n": OurKey("evaluation.samples"),
    "val_kwargs.temperature": OurKey("evaluation.temperature"),
    "val_kwargs.do_sample": OurKey("evaluation.temperature", "0 is greedy; null is sampling.temperature."),
    "gpu_memory_utilization": OurKey("engine.options.gpu_memory_utilization", "SGLang's is mem_fraction_static."),
    "tensor_model_parallel_size": OurKey("engine.options.tensor_parallel_size"),
    "pipeline_model_parallel_size": OurKey("engine.options.pipeline_parallel_size"),
    "data_parallel_size": OurKey("workers.count", "Each worker has an engine of its own."),
    "max_num_seqs": OurKey("engine.max_concurrent"),
    "max_model_len": OurKey("engine.max_model_len"),
    "max_num_batched_tokens": OurKey("engine.options.max_num_batched_tokens"),
    "expert_parallel_size": OurKey("engine.options.enable_expert_parallel", "A switch of vLLM's; verl's is a size."),
    "rollout.quantization": OurKey("engine.options.quantization"),
    "scheduling_policy": OurKey("engine.options.scheduling_policy"),
    "cudagraph_capture_sizes": OurKey("engine.options.cudagraph_capture_sizes"),
    "disable_log_stats": OurKey("engine.options.disable_log_stats"),
    "enforce_eager": OurKey("engine.options.enforce_eager"),
    "enable_chunked_prefill": OurKey("engine.options.enable_chunked_prefill"),
    "enable_prefix_caching": OurKey("engine.options.enable_prefix_caching"),
    "engine_kwargs": OurKey("engine.options", "By the engine's own names."),
    "load_format": OurKey(remark="An engine loads model.path, and then gets each version from the learner."),
    "layered_summon": OurKey(remark="Weights always travel in buckets of weights.bucket_bytes."),
    "update_weights_bucket_megabytes": OurKey("weights.bucket_bytes", "It counts bytes."),
    "checkpoint_engine": OurKey("weights.transport", "gloo, nccl or ipc."),
    "calculate_log_probs": OurKey(remark="Engines always report the logprobs of what they sample."),
    "multi_turn": OurKey("environment", EPISODES),
    "agent": OurKey("environment", EPISODES),
    # algorithm
    "adv_estimator": OurKey(
        "algorithm.preset",
        "gae is ppo; grpo, reinforce_plus_plus and reinforce_plus_plus_baseline have the same names. rloo is grpo with"
        " algorithm.advantage.kind=leave_one_out; others have none.",
    ),
    "gamma": OurKey("algorithm.advantage.options.gamma", "Of the preset ppo."),
    "lam": OurKey("algorithm.advantage.options.lam", "Of the preset ppo. It is 0.95 by default; verl's is 1."),
    "norm_adv_by_std_in_grpo": OurKey(
        "algorithm.advantage.kind", "False is group_mean, True is group_mean_std, the default of grpo."
    ),
    "use_kl_in_reward": OurKey("algorithm.kl.place", "True is `reward`, False is `loss`."),
    "kl_penalty": OurKey("algorithm.kl.kind", "kl is k1, mse k2 and low_var_kl k3; others have none."),
    "kl_ctrl": OurKey("algorithm.kl.coefficient", "It is fixed: there is no adaptive one."),
    "filter_groups": OurKey(
        "algorithm.dynamic_sampling", "It is the largest number of rounds in a step: enable=False is 0, True 1 or more."
    ),
    "rollout_correction": OurKey(
        "algorithm.corrections",
        "rollout_is=token is [{kind: truncated_is, options: {cap: 2.0}}], sequence is sequence_truncated_is;"
        " bypass_mode=True is algorithm.objective.anchor=behavior. `headway algorithms` lists all corrections.",
    ),
    # critic
    "critic": OurKey(remark="The critic of the preset ppo has the policy's optimizer, layout and micro-batches."),
    "critic.enable": OurKey("algorithm.preset", "ppo alone has a critic."),
    "critic.optim.lr": OurKey("algorithm.critic.learning_rate"),
    "critic.cliprange_value": OurKey("algorithm.critic.clip", "It is 0.2 by default; verl's is 0.5."),
    "critic.model.path": OurKey(
        "algorithm.critic.path", "The directory of a reward model; without it the critic starts from the policy."
    ),
    "critic_warmup": OurKey(remark="Policy and critic learn from the first step on."),
    # reward, reward_model, custom_reward_function
    "custom_reward_function": OurKey(
        "rewards", "path=my_rewards.py and name=compute_score are [{kind: 'my_rewards:compute_score'}]."
    ),
    "reward_model": OurKey("scorers", "Its processes. " + REWARD_MODEL),
    "reward_model.enable": OurKey("rewards", REWARD_MODEL),
    "reward_model.model.path": OurKey("rewards", REWARD_MODEL),
    "reward_model.model_path": OurKey("rewards", REWARD_MODEL),
    "reward_model.rollout": OurKey("scorers.engine"),
    "reward_model.num_workers": OurKey("rewards", "rewards[0].processes is the number in each worker."),
    "reward.num_workers": OurKey("rewards", "rewards[0].processes is the number in each worker."),
    "reward_model.reward_manager": OurKey("rewards", "Each response is scored by itself; the sum of `rewards` counts."),
    "reward.reward_manager": OurKey("rewards", "Each response is scored by itself; the sum of `rewards` counts."),
    "reward_model.overlong_buffer": OurKey("algorithm.reward.overlong_buffer", "Tokens; the penalty's factor is 1."),
    "reward_kwargs.overlong_buffer_cfg": OurKey(
        "algorithm.reward.overlong_buffer", "Tokens; the penalty's factor is 1."
    ),
    "sandbox_fusion": OurKey(remark="A reward function of your own can ask a sandbox."),
    "ray_kwargs": OurKey("launcher", "{kind: ray} puts a run on a Ray cluster."),
    "global_profiler": OurKey(remark="Headway has no profiler."),
    # trainer
    "total_epochs": OurKey("prompts.epochs", EPOCHS),
    "total_training_steps": OurKey("learner.steps"),
    "n_gpus_per_node": OurKey("learner.processes", DEVICES),
    "nnodes": OurKey("learner.processes", DEVICES),
    "trainer.device": OurKey("learner.device", "It is cpu by default."),
    "project_name": OurKey("metrics", "[{kind: jsonl}, {kind: wandb, options: {project: NAME}}]."),
    "experiment_name": OurKey("run.name"),
    "logger": OurKey("metrics", SINKS),
    "save_freq": OurKey("checkpoint.every_steps", "At least 1; -1 has no counterpart."),
    "test_freq": OurKey("evaluation.every_steps", "0, not -1, is only before and after training."),
    "val_before_train": OurKey(remark="Runs evaluate before and after training, or never with evaluation.prompts=0."),
    "val_only": OurKey(remark="`headway eval` measures a model on the held-out prompts."),
    "default_local_dir": OurKey("run.directory", "The parent: the run writes into run.directory/run.name."),
    "max_actor_ckpt_to_keep": OurKey("checkpoint.keep"),
    "max_critic_ckpt_to_keep": OurKey("checkpoint.keep"),
    "resume_mode": OurKey(
        remark="`headway run RECIPE --resume` goes on with a run; without --resume none is continued."
    ),
    "resume_from_path": OurKey("run.name", "`headway run RECIPE --resume` goes on with the run of this name."),
    "balance_batch": OurKey(remark="Batches are always balanced over the learner's GPUs."),
    "trainer_mode": OurKey("staleness.max_lag", "0 is sync; run.placement is separated or colocated."),
    "num_warmup_batches": OurKey(
        "staleness.ahead", "Steps that are begun beyond the next one; at most staleness.max_lag."
    ),
    "rollout_data_dir": OurKey(
        remark="`headway report` shows samples of the run's experience log, checkpoint.log_bytes."
    ),
    "parameter_sync_step": OurKey("learner.updates_per_step", "A step's weights are published at its end."),
    "max_off_policy_threshold": OurKey("staleness.max_lag", "One less: verl counts the current version, too."),
    "max_off_policy_strategy": OurKey("staleness.on_over_bound", "wait is staleness.on_straggler=wait, the default."),
    "staleness_threshold": OurKey(
        "staleness.ahead", "A share of a step in both; staleness.max_lag is at least as much."
    ),
}

OF_TRL = {
    "adam_beta1": OurKey("optimizer.beta1"),
    "adam_beta2": OurKey("optimizer.beta2", "It is 0.95 by default; TRL's is 0.999."),
    "adam_epsilon": OurKey("optimizer.epsilon"),
    "attn_implementation": OurKey(remark=KERNELS),
    "beta": OurKey("algorithm.kl.coefficient"),
    "bf16": OurKey("model.dtype", "bfloat16; the engine's own is engine.dtype."),
    "chat_template_kwargs": OurKey("model.chat_template", CHAT),
    "dataset_name": OurKey("prompts.path", "With prompts.kind=datasets."),
    "delta": OurKey("algorithm.objective.options.dual_clip"),
    "dtype": OurKey("model.dtype", "The engine's own is engine.dtype."),
    "entropy_coef": OurKey("algorithm.entropy_coefficient"),
    "entropy_coef_delta": OurKey(remark=FIXED_ENTROPY),
    "entropy_coef_max": OurKey(remark=FIXED_ENTROPY),
    "entropy_coef_min": OurKey(remark=FIXED_ENTROPY),
    "entropy_target": OurKey(remark=FIXED_ENTROPY),
    "epsilon": OurKey("algorithm.objective.options.clip_low"),
    "epsilon_high": OurKey(
        "algorithm.objective.options.clip_high", 'Of loss_type="cispo" TRL\'s is the largest ratio: 1 + clip_high.'
    ),
    "eval_dataset": OurKey("prompts.options.held_out_path"),
    "eval_strategy": OurKey("evaluation.every_steps", "0 is only before and after training."),
    "eval_steps": OurKey("evaluation.every_steps", UPDATES),
    "generation_batch_size": OurKey(
        "learner.groups_per_step", "It counts prompts: generation_batch_size / num_generations."
    ),
    "gradient_accumulation_steps": OurKey(
        "learner.updates_per_step", "It is steps_per_generation / gradient_accumulation_steps."
    ),
    "gradient_checkpointing": OurKey("learner.compute.recompute", "True is `full`; the default is `none`."),
    "importance_sampling_level": OurKey("algorithm.preset", '"sequence" is gspo.'),
    "load_in_4bit": OurKey("model.adapter.quantize_base", "True is nf4."),
    "load_in_8bit": OurKey("model.adapter.quantize_base", "True is int8."),
    "log_completions": OurKey(remark="`headway report` shows samples of the run."),
    "logging_steps": OurKey(remark="Every step is a line of the run's metrics.jsonl."),
    "lora_r": OurKey("model.adapter.rank"),
    "lora_dropout": OurKey("model.adapter.dropout", "Of supervised stages: it is 0 in reinforcement learning."),
    "lora_target_modules": OurKey("model.adapter.targets", "Leave it out for all linear layers and experts."),
    "loss_type": OurKey(
        "algorithm.aggregation.kind",
        '"dapo" is token_mean, "grpo" sequence_mean and "dr_grpo" fixed_denominator. "cispo" and "sapo" are'
        " algorithm.preset; others have none.",
    ),
    "mask_truncated_completions": OurKey("algorithm.mask_truncated"),
    "max_completion_length": OurKey("sampling.max_new_tokens"),
    "max_staleness": OurKey("staleness.max_lag"),
    "max_steps": OurKey("learner.steps", UPDATES),
    "min_p": OurKey(remark="Responses are sampled by sampling.temperature, top_p and top_k."),
    "model_name_or_path": OurKey("model.path"),
    "num_generations": OurKey("learner.group_size"),
    "num_generations_eval": OurKey("evaluation.samples"),
    "num_iterations": OurKey(remark=ONCE),
    "num_train_epochs": OurKey("prompts.epochs", EPOCHS),
    "off_policy_mask_threshold": OurKey("algorithm.corrections", "[{kind: opsm, options: {delta: THRESHOLD}}]."),
    "output_dir": OurKey("run.directory", "The parent: the run writes into run.directory/run.name."),
    "peft_config": OurKey("model.adapter"),
    "per_device_train_batch_size": OurKey(
        "learner.micro_batch_tokens",
        "It counts packed tokens, where TRL's counts completions; learner.groups_per_step is the batch in prompts.",
    ),
    "ref_model_mixup_alpha": OurKey("algorithm.kl.ema_decay", "It is 1 - alpha, at every step."),
    "ref_model_sync_steps": OurKey(
        remark="With algorithm.kl.ema_decay the reference follows the policy at every step."
    ),
    "repetition_penalty": OurKey(remark="Responses are sampled by sampling.temperature, top_p and top_k."),
    "report_to": OurKey("metrics", SINKS),
    "resume_from_checkpoint": OurKey(remark="`headway run RECIPE --resume` goes on with a run."),
    "reward_funcs": OurKey("rewards"),
    "reward_weights": OurKey("rewards", "Each has its own weight: [{kind: 'my_rewards:right', weight: 0.5}]."),
    "run_name": OurKey("run.name"),
    "save_steps": OurKey("checkpoint.every_steps", UPDATES),
    "save_total_limit": OurKey("checkpoint.keep"),
    "scale_rewards": OurKey(
        "algorithm.advantage.kind",
        '"group" is group_mean_std, "none" group_mean; "batch" is near group_mean_global_std, which takes the deviation'
        " of the centred rewards.",
    ),
    "sapo_temperature_neg": OurKey("algorithm.objective.options.tau_negative"),
    "sapo_temperature_pos": OurKey("algorithm.objective.options.tau_positive"),
    "shuffle_dataset": OurKey("prompts.shuffle"),
    "steps_per_generation": OurKey(
        "learner.updates_per_step", "It is steps_per_generation / gradient_accumulation_steps."
    ),
    "sync_ref_model": OurKey("algorithm.kl.ema_decay", "Below 1 the reference follows the policy."),
    "train_dataset": OurKey("prompts.path"),
    "use_adaptive_entropy": OurKey(remark=FIXED_ENTROPY),
    "use_liger_kernel": OurKey(remark=KERNELS),
    "use_peft": OurKey("model.adapter", "{} is one with the defaults, null none."),
    "use_vllm": OurKey("engine.kind", "True is `vllm`."),
    "vllm_enable_sleep_mode": OurKey("run.placement", "With `colocated`, engines sleep while the learner trains."),
    "vllm_gpu_memory_utilization": OurKey("engine.options.gpu_memory_utilization"),
    "vllm_importance_sampling_clip_max": OurKey(
        "algorithm.corrections", "[{kind: truncated_is, options: {cap: 2.0}}]."
    ),
    "vllm_importance_sampling_correction": OurKey("algorithm.corrections", "False is the default, an empty list."),
    "vllm_importance_sampling_mode": OurKey(
        "algorithm.corrections", "token_truncate is [{kind: truncated_is}], sequence_truncate sequence_truncated_is."
    ),
    "vllm_max_model_length": OurKey("engine.max_model_len"),
    "vllm_mode": OurKey("run.placement", '"colocate" is `colocated`, "server" is `separated`, the default.'),
    "vllm_tensor_parallel_size": OurKey("engine.options.tensor_parallel_size"),
    "vllm_group_port": OurKey(remark=STARTS_ENGINES),
    "vllm_server_base_url": OurKey(remark=STARTS_ENGINES),
    "vllm_server_host": OurKey(remark=STARTS_ENGINES),
    "vllm_server_port": OurKey(remark=STARTS_ENGINES),
    "vllm_server_timeout": OurKey(remark=STARTS_ENGINES),
    "warmup_ratio": OurKey("optimizer.warmup_steps", "It counts steps: the ratio times learner.steps."),
}

FOREIGN_KEYS = OF_VERL | OF_TRL
