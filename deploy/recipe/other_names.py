"""TRL's and verl's names for a recipe's keys, and what differs. The guide for their users shows these pairs in tables.

A name is the last of a key's path, or as much of the path as tells it from other keys: `rollout.n`. A name of a section
stands for all of its keys that have no longer name here: `critic`, beside `critic.optim.lr`.
"""

from typing import NamedTuple


class Ours(NamedTuple):
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
    "_target_": Ours(remark="It names a class of verl's configuration; a recipe has no such key."),
    # data
    "train_files": Ours("prompts.path", "One file, with prompts.kind=parquet."),
    "val_files": Ours("prompts.options.held_out_path", "evaluation.prompts says how many of its prompts are asked."),
    "prompt_key": Ours("prompts.options.prompt_field"),
    "train_batch_size": Ours("learner.groups_per_step", "Both count prompts."),
    "gen_batch_size": Ours(remark="Prompts are taken one by one; staleness.ahead says how many steps are begun ahead."),
    "val_batch_size": Ours(remark="An engine takes as many requests of an evaluation as it has room for."),
    "max_prompt_length": Ours("engine.max_model_len", "It counts prompt and response: the sum of verl's two."),
    "prompt_length": Ours("engine.max_model_len", "It counts prompt and response: the sum of verl's two."),
    "max_response_length": Ours("sampling.max_new_tokens"),
    "response_length": Ours("sampling.max_new_tokens"),
    "filter_overlong_prompts": Ours(remark=NEVER_CUT),
    "truncation": Ours(remark=NEVER_CUT),
    "seed": Ours("run.seed"),
    "data.shuffle": Ours("prompts.shuffle"),
    "data.tokenizer": Ours(remark="The tokenizer is the one in model.path."),
    "custom_cls": Ours("prompts.kind", "Your own source is package.module:Class."),
    "apply_chat_template_kwargs": Ours("model.chat_template", CHAT),
    "reward_fn_key": Ours(remark="A reward is given the row's data_source; rewards are chosen by `rewards` alone."),
    "return_raw_chat": Ours(remark="A reward is given the rendered text and the row's columns, always."),
    "train_max_samples": Ours(remark="All rows of the file are read: cut the file."),
    "val_max_samples": Ours("evaluation.prompts"),
    "image_key": Ours(remark="Headway trains on text alone."),
    # actor_rollout_ref.model
    "model.path": Ours("model.path"),
    "tokenizer_path": Ours(remark="The tokenizer is the one in model.path."),
    "trust_remote_code": Ours(remark=OWN_CODE),
    "external_lib": Ours(remark=OWN_CODE),
    "override_config": Ours(remark="The model's configuration is the one in model.path."),
    "hf_config_path": Ours(remark="The model's configuration is the one in model.path."),
    "lora_adapter_path": Ours(remark="An adapter starts anew: merge an old one into the model first."),
    "custom_chat_template": Ours("model.chat_template", "It names a file, where verl's is the template itself."),
    "use_remove_padding": Ours(remark=PACKED),
    "enable_gradient_checkpointing": Ours("learner.compute.recompute", "True is `full`; the default is `none`."),
    "enable_activation_offload": Ours(remark="Activations stay on the GPU, or learner.compute.recompute drops them."),
    "use_fused_kernels": Ours(remark=KERNELS),
    "use_liger": Ours(remark=KERNELS),
    "lora_rank": Ours("model.adapter.rank", "0, for none, is model.adapter=null here."),
    "lora_alpha": Ours("model.adapter.alpha"),
    "target_modules": Ours("model.adapter.targets", "Leave it out for all linear layers and experts."),
    "lora": Ours("model.adapter"),
    # actor_rollout_ref.actor and .ref
    "strategy": Ours("learner.backend", "fsdp (FSDP2) or megatron."),
    "lr": Ours("optimizer.learning_rate"),
    "lr_scheduler_type": Ours("optimizer.schedule"),
    "lr_decay_style": Ours("optimizer.schedule"),
    "lr_warmup_steps": Ours("optimizer.warmup_steps"),
    "lr_warmup_steps_ratio": Ours("optimizer.warmup_steps", "It counts steps: the ratio times learner.steps."),
    "min_lr_ratio": Ours(remark="optimizer.schedule falls to 0, or is constant."),
    "optim.optimizer": Ours(remark="The optimizer is AdamW."),
    "optim.weight_decay": Ours("optimizer.weight_decay", "It is 0 by default; verl's is 0.01."),
    "betas": Ours("optimizer.beta2", "With optimizer.beta1. Headway has 0.9 and 0.95 by default, verl 0.9 and 0.999."),
    "clip_grad": Ours("optimizer.max_grad_norm"),
    "grad_clip": Ours("optimizer.max_grad_norm"),
    "ppo_mini_batch_size": Ours("learner.updates_per_step", "It is train_batch_size / ppo_mini_batch_size."),
    "ppo_micro_batch_size": Ours("learner.micro_batch_tokens", MICRO_BATCH),
    "ppo_micro_batch_size_per_gpu": Ours("learner.micro_batch_tokens", MICRO_BATCH),
    "ppo_max_token_len_per_gpu": Ours(
        "learner.micro_batch_tokens", "With learner.layout.context it counts the tokens of all GPUs of a sequence."
    ),
    "log_prob_micro_batch_size": Ours("learner.micro_batch_tokens", MICRO_BATCH),
    "log_prob_micro_batch_size_per_gpu": Ours("learner.micro_batch_tokens", MICRO_BATCH),
    "log_prob_max_token_len_per_gpu": Ours("learner.micro_batch_tokens", "All passes have the same micro-batches."),
    "use_dynamic_bsz": Ours(remark=PACKED),
    "log_prob_use_dynamic_bsz": Ours(remark=PACKED),
    "ppo_epochs": Ours(remark=ONCE),
    "actor.shuffle": Ours(remark=ONCE),
    "clip_ratio": Ours("algorithm.objective.options.clip_low", "And the same as clip_high."),
    "clip_ratio_low": Ours("algorithm.objective.options.clip_low"),
    "clip_ratio_high": Ours("algorithm.objective.options.clip_high"),
    "clip_ratio_c": Ours("algorithm.objective.options.dual_clip", "It is off by default; verl's is 3."),
    "tau_pos": Ours("algorithm.objective.options.tau_positive"),
    "tau_neg": Ours("algorithm.objective.options.tau_negative"),
    "policy_loss": Ours(
        remark="Settings of a loss are algorithm.objective.options; clip_cov, kl_cov and dro have no counterpart."
    ),
    "policy_loss.loss_mode": Ours(
        "algorithm.preset", "vanilla is grpo, dppo_tv dppo; gspo, sapo and cispo have the same names, others none."
    ),
    "loss_agg_mode": Ours(
        "algorithm.aggregation.kind",
        "token-mean is token_mean, seq-mean-token-mean sequence_mean, seq-mean-token-sum sequence_sum and"
        " seq-mean-token-sum-norm fixed_denominator.",
    ),
    "loss_scale_factor": Ours("algorithm.aggregation.options.length", "Of kind fixed_denominator."),
    "entropy_from_logits_with_chunking": Ours(remark="The output head always works in chunks of tokens."),
    "entropy_from_logits_chunk_size": Ours(remark="The output head always works in chunks of tokens."),
    "entropy_coeff": Ours("algorithm.entropy_coefficient"),
    "use_kl_loss": Ours("algorithm.kl.coefficient", "0 is False; above 0 the penalty is in the loss."),
    "kl_loss_coef": Ours("algorithm.kl.coefficient", "It alone switches the penalty on: 0 where use_kl_loss is False."),
    "kl_loss_type": Ours("algorithm.kl.kind", "kl is k1, mse k2 and low_var_kl k3; others have none."),
    "tis_imp_ratio_cap": Ours("algorithm.corrections", "[{kind: truncated_is, options: {cap: 2.0}}]."),
    "megatron.router_replay": Ours("algorithm.router_replay"),
    "enable_rollout_routing_replay": Ours("algorithm.router_replay"),
    "ulysses_sequence_parallel_size": Ours("learner.layout.context"),
    "use_torch_compile": Ours("learner.compute.compile", "It compiles the layers."),
    "fsdp_config": Ours(remark="FSDP2 shards over all learner.processes, and has no further settings."),
    "fsdp_config.dtype": Ours("model.dtype"),
    "fsdp_config.ulysses_sequence_parallel_size": Ours("learner.layout.context"),
    "fsdp_config.use_torch_compile": Ours("learner.compute.compile", "It compiles the layers."),
    "fsdp_config.model_dtype": Ours(remark="Masters and moments are float32; model.dtype is the passes' format."),
    "optimizer_offload": Ours("learner.compute.offload_optimizer"),
    "fsdp_config.optimizer_offload": Ours("learner.compute.offload_optimizer"),
    "fsdp_config.param_offload": Ours(remark=IN_TURNS),
    "megatron": Ours(remark="Megatron's settings are those of learner.layout and learner.compute."),
    "megatron.dtype": Ours("model.dtype"),
    "megatron.optimizer_offload": Ours(
        remark="Megatron shards the optimizer's state over replicas and context ranks: raise learner.processes."
    ),
    "megatron.param_offload": Ours(remark=IN_TURNS),
    "megatron.tensor_model_parallel_size": Ours("learner.layout.tensor"),
    "megatron.pipeline_model_parallel_size": Ours("learner.layout.pipeline"),
    "megatron.virtual_pipeline_model_parallel_size": Ours("learner.layout.virtual_pipeline"),
    "megatron.context_parallel_size": Ours("learner.layout.context"),
    "megatron.expert_model_parallel_size": Ours("learner.layout.expert"),
    "megatron.expert_tensor_parallel_size": Ours("learner.layout.expert_tensor"),
    "async_save": Ours("checkpoint.asynchronous"),
    "checkpoint.save_contents": Ours(remark="A checkpoint always has all that a resumed run needs."),
    "checkpoint.load_contents": Ours(remark="A checkpoint always has all that a resumed run needs."),
    # actor_rollout_ref.rollout
    "hybrid_engine": Ours("run.placement", "True is `colocated`; the default is `separated`."),
    "free_cache_engine": Ours("run.placement", "With `colocated`, engines sleep while the learner trains."),
    "rollout.name": Ours("engine.kind", "vllm or sglang."),
    "rollout.mode": Ours(remark="Generation is always asynchronous; with staleness.max_lag=0 it waits for each step."),
    "rollout.n": Ours("learner.group_size"),
    "rollout.dtype": Ours("engine.dtype"),
    "rollout.n_gpus_per_node": Ours("workers.devices", "A list of the engines' GPUs; workers.count is their number."),
    "rollout.nnodes": Ours(
        remark="On other machines `headway workers` starts the engines; `headway launch` writes scripts."
    ),
    "temperature": Ours("sampling.temperature"),
    "top_p": Ours("sampling.top_p"),
    "top_k": Ours("sampling.top_k", "0, not -1, is all tokens."),
    "do_sample": Ours(remark="Training always samples. Greedy evaluations are evaluation.temperature=0."),
    "val_kwargs": Ours(remark="An evaluation samples by `sampling`, but for its temperature."),
    "val_kwargs.n": Ours("evaluation.samples"),
    "val_kwargs.temperature": Ours("evaluation.temperature"),
    "val_kwargs.do_sample": Ours("evaluation.temperature", "0 is greedy; null is sampling.temperature."),
    "gpu_memory_utilization": Ours("engine.options.gpu_memory_utilization", "SGLang's is mem_fraction_static."),
    "tensor_model_parallel_size": Ours("engine.options.tensor_parallel_size"),
    "pipeline_model_parallel_size": Ours("engine.options.pipeline_parallel_size"),
    "data_parallel_size": Ours("workers.count", "Each worker has an engine of its own."),
    "max_num_seqs": Ours("engine.max_concurrent"),
    "max_model_len": Ours("engine.max_model_len"),
    "max_num_batched_tokens": Ours("engine.options.max_num_batched_tokens"),
    "expert_parallel_size": Ours("engine.options.enable_expert_parallel", "A switch of vLLM's; verl's is a size."),
    "rollout.quantization": Ours("engine.options.quantization"),
    "scheduling_policy": Ours("engine.options.scheduling_policy"),
    "cudagraph_capture_sizes": Ours("engine.options.cudagraph_capture_sizes"),
    "disable_log_stats": Ours("engine.options.disable_log_stats"),
    "enforce_eager": Ours("engine.options.enforce_eager"),
    "enable_chunked_prefill": Ours("engine.options.enable_chunked_prefill"),
    "enable_prefix_caching": Ours("engine.options.enable_prefix_caching"),
    "engine_kwargs": Ours("engine.options", "By the engine's own names."),
    "load_format": Ours(remark="An engine loads model.path, and then gets each version from the learner."),
    "layered_summon": Ours(remark="Weights always travel in buckets of weights.bucket_bytes."),
    "update_weights_bucket_megabytes": Ours("weights.bucket_bytes", "It counts bytes."),
    "checkpoint_engine": Ours("weights.transport", "gloo, nccl or ipc."),
    "calculate_log_probs": Ours(remark="Engines always report the logprobs of what they sample."),
    "multi_turn": Ours("environment", EPISODES),
    "agent": Ours("environment", EPISODES),
    # algorithm
    "adv_estimator": Ours(
        "algorithm.preset",
        "gae is ppo; grpo, reinforce_plus_plus and reinforce_plus_plus_baseline have the same names. rloo is grpo with"
        " algorithm.advantage.kind=leave_one_out; others have none.",
    ),
    "gamma": Ours("algorithm.advantage.options.gamma", "Of the preset ppo."),
    "lam": Ours("algorithm.advantage.options.lam", "Of the preset ppo. It is 0.95 by default; verl's is 1."),
    "norm_adv_by_std_in_grpo": Ours(
        "algorithm.advantage.kind", "False is group_mean, True is group_mean_std, the default of grpo."
    ),
    "use_kl_in_reward": Ours("algorithm.kl.place", "True is `reward`, False is `loss`."),
    "kl_penalty": Ours("algorithm.kl.kind", "kl is k1, mse k2 and low_var_kl k3; others have none."),
    "kl_ctrl": Ours("algorithm.kl.coefficient", "It is fixed: there is no adaptive one."),
    "filter_groups": Ours(
        "algorithm.dynamic_sampling", "It is the largest number of rounds in a step: enable=False is 0, True 1 or more."
    ),
    "rollout_correction": Ours(
        "algorithm.corrections",
        "rollout_is=token is [{kind: truncated_is, options: {cap: 2.0}}], sequence is sequence_truncated_is;"
        " bypass_mode=True is algorithm.objective.anchor=behavior. `headway algorithms` lists all corrections.",
    ),
    # critic
    "critic": Ours(remark="The critic of the preset ppo has the policy's optimizer, layout and micro-batches."),
    "critic.enable": Ours("algorithm.preset", "ppo alone has a critic."),
    "critic.optim.lr": Ours("algorithm.critic.learning_rate"),
    "critic.cliprange_value": Ours("algorithm.critic.clip", "It is 0.2 by default; verl's is 0.5."),
    "critic.model.path": Ours(
        "algorithm.critic.path", "The directory of a reward model; without it the critic starts from the policy."
    ),
    "critic_warmup": Ours(remark="Policy and critic learn from the first step on."),
    # reward, reward_model, custom_reward_function
    "custom_reward_function": Ours(
        "rewards", "path=my_rewards.py and name=compute_score are [{kind: 'my_rewards:compute_score'}]."
    ),
    "reward_model": Ours("scorers", "Its processes. " + REWARD_MODEL),
    "reward_model.enable": Ours("rewards", REWARD_MODEL),
    "reward_model.model.path": Ours("rewards", REWARD_MODEL),
    "reward_model.model_path": Ours("rewards", REWARD_MODEL),
    "reward_model.rollout": Ours("scorers.engine"),
    "reward_model.num_workers": Ours("rewards", "rewards[0].processes is the number in each worker."),
    "reward.num_workers": Ours("rewards", "rewards[0].processes is the number in each worker."),
    "reward_model.reward_manager": Ours("rewards", "Each response is scored by itself; the sum of `rewards` counts."),
    "reward.reward_manager": Ours("rewards", "Each response is scored by itself; the sum of `rewards` counts."),
    "reward_model.overlong_buffer": Ours("algorithm.reward.overlong_buffer", "Tokens; the penalty's factor is 1."),
    "reward_kwargs.overlong_buffer_cfg": Ours("algorithm.reward.overlong_buffer", "Tokens; the penalty's factor is 1."),
    "sandbox_fusion": Ours(remark="A reward function of your own can ask a sandbox."),
    "ray_kwargs": Ours("launcher", "{kind: ray} puts a run on a Ray cluster."),
    "global_profiler": Ours(remark="Headway has no profiler."),
    # trainer
    "total_epochs": Ours("prompts.epochs", EPOCHS),
    "total_training_steps": Ours("learner.steps"),
    "n_gpus_per_node": Ours("learner.processes", DEVICES),
    "nnodes": Ours("learner.processes", DEVICES),
    "trainer.device": Ours("learner.device", "It is cpu by default."),
    "project_name": Ours("metrics", "[{kind: jsonl}, {kind: wandb, options: {project: NAME}}]."),
    "experiment_name": Ours("run.name"),
    "logger": Ours("metrics", SINKS),
    "save_freq": Ours("checkpoint.every_steps", "At least 1; -1 has no counterpart."),
    "test_freq": Ours("evaluation.every_steps", "0, not -1, is only before and after training."),
    "val_before_train": Ours(remark="Runs evaluate before and after training, or never with evaluation.prompts=0."),
    "val_only": Ours(remark="`headway eval` measures a model on the held-out prompts."),
    "default_local_dir": Ours("run.directory", "The parent: the run writes into run.directory/run.name."),
    "max_actor_ckpt_to_keep": Ours("checkpoint.keep"),
    "max_critic_ckpt_to_keep": Ours("checkpoint.keep"),
    "resume_mode": Ours(remark="`headway run RECIPE --resume` goes on with a run; without --resume none is continued."),
    "resume_from_path": Ours("run.name", "`headway run RECIPE --resume` goes on with the run of this name."),
    "balance_batch": Ours(remark="Batches are always balanced over the learner's GPUs."),
    "trainer_mode": Ours("staleness.max_lag", "0 is sync; run.placement is separated or colocated."),
    "num_warmup_batches": Ours(
        "staleness.ahead", "Steps that are begun beyond the next one; at most staleness.max_lag."
    ),
    "rollout_data_dir": Ours(
        remark="`headway report` shows samples of the run's experience log, checkpoint.log_bytes."
    ),
    "parameter_sync_step": Ours("learner.updates_per_step", "A step's weights are published at its end."),
    "max_off_policy_threshold": Ours("staleness.max_lag", "One less: verl counts the current version, too."),
    "max_off_policy_strategy": Ours("staleness.on_over_bound", "wait is staleness.on_straggler=wait, the default."),
    "staleness_threshold": Ours("staleness.ahead", "A share of a step in both; staleness.max_lag is at least as much."),
}

OF_TRL = {
    "adam_beta1": Ours("optimizer.beta1"),
    "adam_beta2": Ours("optimizer.beta2", "It is 0.95 by default; TRL's is 0.999."),
    "adam_epsilon": Ours("optimizer.epsilon"),
    "attn_implementation": Ours(remark=KERNELS),
    "beta": Ours("algorithm.kl.coefficient"),
    "bf16": Ours("model.dtype", "bfloat16; the engine's own is engine.dtype."),
    "chat_template_kwargs": Ours("model.chat_template", CHAT),
    "dataset_name": Ours("prompts.path", "With prompts.kind=datasets."),
    "delta": Ours("algorithm.objective.options.dual_clip"),
    "dtype": Ours("model.dtype", "The engine's own is engine.dtype."),
    "entropy_coef": Ours("algorithm.entropy_coefficient"),
    "entropy_coef_delta": Ours(remark=FIXED_ENTROPY),
    "entropy_coef_max": Ours(remark=FIXED_ENTROPY),
    "entropy_coef_min": Ours(remark=FIXED_ENTROPY),
    "entropy_target": Ours(remark=FIXED_ENTROPY),
    "epsilon": Ours("algorithm.objective.options.clip_low"),
    "epsilon_high": Ours(
        "algorithm.objective.options.clip_high", 'Of loss_type="cispo" TRL\'s is the largest ratio: 1 + clip_high.'
    ),
    "eval_dataset": Ours("prompts.options.held_out_path"),
    "eval_strategy": Ours("evaluation.every_steps", "0 is only before and after training."),
    "eval_steps": Ours("evaluation.every_steps", UPDATES),
    "generation_batch_size": Ours(
        "learner.groups_per_step", "It counts prompts: generation_batch_size / num_generations."
    ),
    "gradient_accumulation_steps": Ours(
        "learner.updates_per_step", "It is steps_per_generation / gradient_accumulation_steps."
    ),
    "gradient_checkpointing": Ours("learner.compute.recompute", "True is `full`; the default is `none`."),
    "importance_sampling_level": Ours("algorithm.preset", '"sequence" is gspo.'),
    "load_in_4bit": Ours("model.adapter.quantize_base", "True is nf4."),
    "load_in_8bit": Ours("model.adapter.quantize_base", "True is int8."),
    "log_completions": Ours(remark="`headway report` shows samples of the run."),
    "logging_steps": Ours(remark="Every step is a line of the run's metrics.jsonl."),
    "lora_r": Ours("model.adapter.rank"),
    "lora_dropout": Ours("model.adapter.dropout", "Of supervised stages: it is 0 in reinforcement learning."),
    "lora_target_modules": Ours("model.adapter.targets", "Leave it out for all linear layers and experts."),
    "loss_type": Ours(
        "algorithm.aggregation.kind",
        '"dapo" is token_mean, "grpo" sequence_mean and "dr_grpo" fixed_denominator. "cispo" and "sapo" are'
        " algorithm.preset; others have none.",
    ),
    "mask_truncated_completions": Ours("algorithm.mask_truncated"),
    "max_completion_length": Ours("sampling.max_new_tokens"),
    "max_staleness": Ours("staleness.max_lag"),
    "max_steps": Ours("learner.steps", UPDATES),
    "min_p": Ours(remark="Responses are sampled by sampling.temperature, top_p and top_k."),
    "model_name_or_path": Ours("model.path"),
    "num_generations": Ours("learner.group_size"),
    "num_generations_eval": Ours("evaluation.samples"),
    "num_iterations": Ours(remark=ONCE),
    "num_train_epochs": Ours("prompts.epochs", EPOCHS),
    "off_policy_mask_threshold": Ours("algorithm.corrections", "[{kind: opsm, options: {delta: THRESHOLD}}]."),
    "output_dir": Ours("run.directory", "The parent: the run writes into run.directory/run.name."),
    "peft_config": Ours("model.adapter"),
    "per_device_train_batch_size": Ours(
        "learner.micro_batch_tokens",
        "It counts packed tokens, where TRL's counts completions; learner.groups_per_step is the batch in prompts.",
    ),
    "ref_model_mixup_alpha": Ours("algorithm.kl.ema_decay", "It is 1 - alpha, at every step."),
    "ref_model_sync_steps": Ours(remark="With algorithm.kl.ema_decay the reference follows the policy at every step."),
    "repetition_penalty": Ours(remark="Responses are sampled by sampling.temperature, top_p and top_k."),
    "report_to": Ours("metrics", SINKS),
    "resume_from_checkpoint": Ours(remark="`headway run RECIPE --resume` goes on with a run."),
    "reward_funcs": Ours("rewards"),
    "reward_weights": Ours("rewards", "Each has its own weight: [{kind: 'my_rewards:right', weight: 0.5}]."),
    "run_name": Ours("run.name"),
    "save_steps": Ours("checkpoint.every_steps", UPDATES),
    "save_total_limit": Ours("checkpoint.keep"),
    "scale_rewards": Ours(
        "algorithm.advantage.kind",
        '"group" is group_mean_std, "none" group_mean; "batch" is near group_mean_global_std, which takes the deviation'
        " of the centred rewards.",
    ),
    "sapo_temperature_neg": Ours("algorithm.objective.options.tau_negative"),
    "sapo_temperature_pos": Ours("algorithm.objective.options.tau_positive"),
    "shuffle_dataset": Ours("prompts.shuffle"),
    "steps_per_generation": Ours(
        "learner.updates_per_step", "It is steps_per_generation / gradient_accumulation_steps."
    ),
    "sync_ref_model": Ours("algorithm.kl.ema_decay", "Below 1 the reference follows the policy."),
    "train_dataset": Ours("prompts.path"),
    "use_adaptive_entropy": Ours(remark=FIXED_ENTROPY),
    "use_liger_kernel": Ours(remark=KERNELS),
    "use_peft": Ours("model.adapter", "{} is one with the defaults, null none."),
    "use_vllm": Ours("engine.kind", "True is `vllm`."),
    "vllm_enable_sleep_mode": Ours("run.placement", "With `colocated`, engines sleep while the learner trains."),
    "vllm_gpu_memory_utilization": Ours("engine.options.gpu_memory_utilization"),
    "vllm_importance_sampling_clip_max": Ours("algorithm.corrections", "[{kind: truncated_is, options: {cap: 2.0}}]."),
    "vllm_importance_sampling_correction": Ours("algorithm.corrections", "False is the default, an empty list."),
    "vllm_importance_sampling_mode": Ours(
        "algorithm.corrections", "token_truncate is [{kind: truncated_is}], sequence_truncate sequence_truncated_is."
    ),
    "vllm_max_model_length": Ours("engine.max_model_len"),
    "vllm_mode": Ours("run.placement", '"colocate" is `colocated`, "server" is `separated`, the default.'),
    "vllm_tensor_parallel_size": Ours("engine.options.tensor_parallel_size"),
    "vllm_group_port": Ours(remark=STARTS_ENGINES),
    "vllm_server_base_url": Ours(remark=STARTS_ENGINES),
    "vllm_server_host": Ours(remark=STARTS_ENGINES),
    "vllm_server_port": Ours(remark=STARTS_ENGINES),
    "vllm_server_timeout": Ours(remark=STARTS_ENGINES),
    "warmup_ratio": Ours("optimizer.warmup_steps", "It counts steps: the ratio times learner.steps."),
}

OTHER_NAMES = OF_VERL | OF_TRL
