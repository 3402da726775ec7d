"""What the measurements share: a model's tokenizer, a run with leases, and a player of agents."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.broker.load import fresh_server
from benchmarks.processes import ROOT
from headway.broker import Broker, open_broker
from headway.broker.client.learner import CheckpointMark
from headway.broker.schema import Lease, Prompt, RunRules, Segment, WeightVersion
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.player import AgentPlayer
from headway.rollout_workers.config import AgentConfig, AgentFormatConfig, SamplingConfig, WorkersConfig
from headway.rollout_workers.decoding import Decoding, load_decoding
from headway.rollout_workers.rewards.base import Score
from headway.rollout_workers.samples.episode import PlayedSample
from headway.rollout_workers.samples.generation import request_of
from headway.rollout_workers.samples.recorder import Recorder, SegmentLog

from .engines import manifest_of

RUN = "agents"
TTL_S = 3600.0
GROUP_SIZE = 8
FED_AT_ONCE = 256
MOST_BYTES = 8 << 30
AGENTS = "benchmarks.agent_throughput.agents"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def written_tokenizer() -> Path:
    """Write a tokenizer of bytes with the special tokens of ChatML into a new directory, and return that."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    words = Path(__file__).with_name("agents.py").read_text()
    tokenizer.train_from_iterator([words, words.replace("\\n", "\n")], trainer)
    directory = Path(mkdtemp(prefix="headway-tokenizer-"))
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    whole.save_pretrained(directory)
    return directory


def end_tokens(model: Path) -> tuple[int, ...]:
    """Return the token that ends an answer in a model's chats."""
    from transformers import AutoTokenizer

    return (AutoTokenizer.from_pretrained(model).eos_token_id,)


class OneReward:
    """A reward of 1 for all that an agent does not score itself."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Return 1."""
        return Score(total=1.0, components={})

    async def close(self) -> None:
        """Do nothing."""


@asynccontextmanager
async def fed(groups: int, token_ids: Sequence[int] = (2, 3)) -> AsyncIterator[tuple[Broker, WeightVersion, int]]:
    """Yield a broker on a server of its own with so many groups of a prompt, all of which a worker may lease, the
    version that is announced, and the process of the server."""
    with fresh_server("everysec") as server:
        broker = await open_broker(server.url, RUN)
        try:
            rules = RunRules(max_lag=groups, groups_per_step=GROUP_SIZE, max_bytes=MOST_BYTES)
            claim = await broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=b"", resume=False)
            version = WeightVersion(claim.owner.incarnation, 0)
            await broker.versions.announce(claim.owner, manifest_of(version))
            for first in range(0, groups, FED_AT_ONCE):
                numbers = range(first, min(groups, first + FED_AT_ONCE))
                await broker.prompts.feed([_prompt(one, token_ids) for one in numbers], claim.owner)
            yield broker, version, server.pid
        finally:
            await broker.close()


def _prompt(number: int, token_ids: Sequence[int]) -> Prompt:
    return Prompt(
        group=f"0000-{number:08d}",
        token_ids=list(token_ids),
        text="The state of an order?",
        ground_truth="",
        data_source="benchmark",
        num_samples=GROUP_SIZE,
    )


async def leases_of(broker: Broker, version: WeightVersion, count: int) -> list[Lease]:
    """Lease samples."""
    return list((await broker.leases.lease("worker", version, count, TTL_S)).leases)


async def opened_player(model: Path, config: AgentConfig) -> tuple[AgentPlayer, Decoding]:
    """Open agents and their endpoint."""
    decoding = load_decoding(model, end_tokens(model))
    roots = ImportRoots(("benchmarks",), ROOT)
    return await AgentPlayer.open(config, OneReward(), decoding, model=model, name="policy", roots=roots), decoding


def agent_config(options: dict[str, Any], **more: Any) -> AgentConfig:
    """Return the settings of ToolUser."""
    form = AgentFormatConfig(kind="chatml")
    return AgentConfig(kind=f"{AGENTS}:ToolUser", options=options, format=form, max_turns=10_000, **more)


def played_sample(
    broker: Broker,
    lease: Lease,
    recorder: Recorder,
    decoding: Decoding,
    generate: Any,
    max_new_tokens: int,
) -> tuple[PlayedSample, SegmentLog]:
    """Return a sample as a worker plays it, each turn durable before it is told."""

    async def append(held: Lease, segment: Segment) -> Any:
        return await broker.leases.append(held, segment, TTL_S)

    log = SegmentLog(lease, recorder, append, WorkersConfig())
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    sample = PlayedSample(
        prompt=lease.prompt,
        number=lease.tid.sample,
        recorder=recorder,
        request=request_of(lease, sampling, decoding),
        generate=generate,
        max_model_len=max_new_tokens + 100_000,
        keep=log.keep_all,
        intend=lambda calls: broker.leases.intend(lease, calls),
    )
    return sample, log


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Keep what is measured so far, so that a later failure does not lose it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))
