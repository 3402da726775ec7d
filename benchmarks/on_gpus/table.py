"""All measurements, by their groups. The first three groups take about ten minutes each on four GPUs."""

from collections.abc import Sequence

from . import races
from .measurement import SMOLLM2, SPARE_S, Machine, Measurement, module

NCCL = ("weights.transport=nccl", "weights.staging=device")
FAULTS = "tests/weightsync/test_faults.py"
WARM_UPS = ("warm_up", "megatron_warm_up", "faults", "more_faults")
"""An engine does not start beside a process that gives memory back, as each of these does at its end."""
TABLES = {"qwen3-1.7b": (0, 180), "qwen3-8b": (16, 210), "qwen3-30b-a3b": (8, 180), "qwen3-0.6b": (0, 130)}
"""Shapes of the learner alone: how many of their layers fit a GPU (0: all), and the seconds after which no case begins.
By an estimate of their operations and of the compiler most cases end by then, the first ones surely."""
LAST_CASE_S = 20
LEAST_TABLE_S = 100
LARGEST = "qwen3-8b"
FEW_REPEATS = ("--compile", "--repeats", 2, "--warm-ups", 1, "--settings", "never,auto")


def groups(machine: Machine) -> dict[str, list[Measurement]]:
    """Return the measurements by the names of their groups."""
    return {
        "first": _first(machine),
        "second": _second(machine),
        "third": _third(machine),
        "long-tailed": races.long_tailed(machine),
        "one-gpu": races.one_gpu(machine),
        "verl": races.verl(machine),
        "learner": _learner(machine),
        "starts": _starts(machine),
        "short": races.short(machine),
    }


def model(machine: Machine) -> list[Measurement]:
    """Return what makes SmolLM2, if it is to be made."""
    command = module("learns.model", machine.gguf, "--output", machine.smollm2)
    return [Measurement(SMOLLM2, command, 300, 45, gpus=0)] if machine.gguf else []


def _tests(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def _first(machine: Machine) -> list[Measurement]:
    """All warm-ups and faults at once, then both runs that learn at once: each needs little."""
    count = len(machine.gpus)
    # Learner and engines share two GPUs; of four, two are the learner's.
    learning: Sequence[str] = ("--gpus", "4", "--learner-gpus", "2", *NCCL)
    sharing = learning
    if count == 2:
        learning = ("--gpus", "2", *NCCL)
        shared = ("workers.count=2", f"workers.devices=[{','.join(machine.gpus)}]")
        sharing = ("--gpus", "2", "--learner-gpus", "2", *shared, "weights.transport=ipc", "weights.staging=host")
    smollm2 = ("--model", machine.smollm2, "--output", machine.output / "smollm2")
    megatron = (
        *("--recipe", "arithmetic-vllm.yaml", "--output", machine.output / "megatron", *sharing),
        *("learner.backend=megatron", "learner.layout.expert=2", "learner.device=cuda", "engine.device=cuda"),
        "engine.options.gpu_memory_utilization=0.2",
    )

    def learns(name: str, part: str, seconds: int, *arguments: object, **rest: object) -> Measurement:
        command = module("learns", *arguments, "--parts", part, "--timeout-s", seconds - SPARE_S)
        return Measurement(name, command, seconds, **rest)  # type: ignore[arg-type]

    ungated = ("tests/weightsync/test_gpu.py", "tests/weightsync/test_hosts.py", "-k")
    return [
        learns("warm_up", "sft", 180, *smollm2, quarters=1, after=machine.model_made),
        learns("megatron_warm_up", "sft", 180, *megatron, gpus=count, quarters=1),
        Measurement(
            "faults",
            _tests(FAULTS, *ungated, "gpu or nccl and not killed_and_stopped"),
            160,
            gpus=count,
            quarters=1,
        ),
        Measurement("more_faults", _tests(FAULTS, "-k", "nccl and killed_and_stopped"), 160, gpus=count, quarters=1),
        learns(
            "grpo",
            "grpo",
            330,
            *(*smollm2, *learning, "engine.options.gpu_memory_utilization=0.3"),
            gpus=count,
            quarters=2,
            after=("warm_up",),
            following=WARM_UPS,
        ),
        learns(
            "megatron",
            "grpo",
            330,
            *megatron,
            gpus=count,
            quarters=2,
            after=("megatron_warm_up",),
            following=WARM_UPS,
        ),
    ]


def _second(machine: Machine) -> list[Measurement]:
    """Asynchrony has three of four GPUs, and what a worker costs the last one."""
    several = min(3, len(machine.gpus))
    place = ("--gpus", several, "--model", machine.smollm2, "--output", machine.output / "asynchrony")

    def run(name: str, seconds: int, *arguments: object) -> Measurement:
        command = module("asynchrony", *place, "--timeout-s", seconds - SPARE_S, "--runs", name, *arguments)
        return Measurement(name, command, seconds, gpus=several, after=("long_tailed",))

    many = ("--of", "colocated", "engine.max_concurrent=256", "engine.options.gpu_memory_utilization=0.7")
    return [
        Measurement(
            "long_tailed",
            module("asynchrony", *place, "--timeout-s", 165, "--runs", ""),
            180,
            after=machine.model_made,
        ),
        run("asynchronous", 180, "--steps", 30),
        run("separated", 200, "--steps", 18),
        run("colocated", 220, "--steps", 16, *many),
        Measurement("worker", module("worker_overhead", "--seconds", 25), 540),
    ]


def _third(machine: Machine) -> list[Measurement]:
    """Weight transfers one after the other, as they share the host's memory, and beside them what needs one GPU."""
    whole = len(machine.gpus)

    def sync(name: str, seconds: int, *arguments: object, gpus: int = 2) -> Measurement:
        command = module("weight_sync", "--output", machine.output / name, *arguments)
        return Measurement(name, command, seconds, gpus=gpus, in_turn="weights")

    moe, halves = ("--shape", "moe-2.4b"), ("--learner-gpus", 2, "--engine-gpus", 2)
    share = ("--share",) if whole == 2 else ()
    return [
        sync("sync", 400, "--native", "--versions", 12),
        sync("sync_moe", 180, "--limit-s", 170, *moe, "--kv-policy", "keep"),
        sync("sync_ipc", 150, "--limit-s", 140, *moe, "--transport", "ipc", *halves),
        Measurement("engines", _tests("tests/rollout_workers/test_engine_contract.py", "-k", "vllm"), 300),
        Measurement("agreement_moe", module("agreement", *moe, "--layers", 4, "--engine", "vllm"), 300),
        Measurement("agreement", module("agreement", "--shape", "qwen3-0.6b", "--engine", "vllm"), 200),
        sync("sync_sharded", 200, "--limit-s", 190, *moe, *halves, *share, gpus=whole),
    ]


def _learner(machine: Machine) -> list[Measurement]:
    """The largest model once the races' are warmed up, which takes no GPU but one, the others meanwhile."""
    rows = ("--whole", 8192, "--groups", "8,16,1", "--tokens", 65536, "--budget", 16384)
    return [
        Measurement(
            f"learner_{shape}",
            module("prefix_trees", "--shape", shape, "--layers", layers, *rows, *FEW_REPEATS, "--seconds", seconds),
            seconds + 120,
            seconds + LAST_CASE_S,
            least=LEAST_TABLE_S,
            following=races.WARM_UPS if shape == LARGEST else (),
            python=machine.learner,
        )
        for shape, (layers, seconds) in TABLES.items()
    ]


def _starts(machine: Machine) -> list[Measurement]:
    """The first run finds nothing that an earlier one left, not even a measurement that failed. A machine that was just
    set up still compiles bytecode, so none starts before the races' models are warmed up. With nothing kept the 8B
    shape took longer than 160 s."""
    caches = ("--caches", machine.output / "caches", "--timeout-s")
    smollm2 = ("--recipe", "smollm2-reasoning-gym.yaml", f"model.path={machine.smollm2}")
    adapter = ("model.adapter={rank: 16, alpha: 32}", "model.dtype=bfloat16", "engine.dtype=bfloat16")
    on_gpu = ("learner.device=cuda", "engine.device=cuda", "engine.max_concurrent=256")
    eight = ("--shape", "qwen3-8b", "--recipe", "arithmetic-vllm.yaml", *adapter, *on_gpu)
    return [
        Measurement(
            "first_step_8b",
            module("first_step", "--gpus", 2, "--runs", 3, *caches, 240, *eight),
            780,
            360,
            least=210,
            gpus=2,
            following=races.WARM_UPS,
        ),
        Measurement(
            "first_step",
            module("first_step", "--gpus", 1, "--runs", 4, *caches, 140, *smollm2),
            580,
            250,
            least=170,
            after=machine.model_made,
            following=races.WARM_UPS,
        ),
    ]
