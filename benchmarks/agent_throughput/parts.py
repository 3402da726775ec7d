"""What the measurements share: a model's tokenizer, a run with leases, and a player of agents."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.broker.load import GROUP_SIZE, Learner, Run, fresh_server
from benchmarks.processes import ROOT
from headway.broker import Broker, open_broker
from headway.broker.schema import Lease, Prompt, Segment
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.player import AgentPlayer
from headway.rollout_workers.agents.tree import EpisodeRecorder
from headway.rollout_workers.config import AgentConfig, AgentFormatConfig, SamplingConfig, WorkersConfig
from headway.rollout_workers.decoding import Decoding, load_decoding
from headway.rollout_workers.rewards.base import Score
from headway.rollout_workers.samples.episode import PlayedSample
from headway.rollout_workers.samples.generation import request_of
from headway.rollout_workers.samples.recorder import Recorder, SegmentLog

RUN = "agents"
TTL_S = 3600.0
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
async def leased(samples: int) -> AsyncIterator[tuple[Broker, list[Lease], int]]:
    """Yield a broker on a server of its own, with so many leases, and the process of the server."""
    with fresh_server("everysec") as server:
        broker = await open_broker(server.url, RUN)
        try:
            groups = -(-samples // GROUP_SIZE)
            learner = await Learner.begin(broker, Run(groups=groups, max_lag=groups))
            assert learner is not None
            version = (await broker.versions.peek()).announced
            assert version is not None
            leases = list((await broker.leases.lease("worker", version, samples, TTL_S)).leases)
            assert len(leases) == samples, f"{len(leases)} leases in the place of {samples}"
            yield broker, leases, server.pid
        finally:
            await broker.close()


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
    player: AgentPlayer,
    decoding: Decoding,
    generate: Any,
    *,
    max_new_tokens: int,
) -> tuple[PlayedSample, SegmentLog]:
    """Return a sample as a worker plays it, each turn durable before it is told."""
    recorder = player.recorder(lease.prompt)

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
    )
    return sample, log


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Keep what is measured so far, so that a later failure does not lose it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))


__all__ = ["EpisodeRecorder", "Recorder", "agent_config", "leased", "opened_player", "played_sample"]
