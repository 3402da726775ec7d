"""`headway generate`: a file of prompts through one engine or many, into a file of answers.

prompts ──► those that the file lacks ──┬─► an engine in this process, as many as it can batch ──► a line for each
                                        └─► workers, through the broker (`batch_inference_workers.py`) ──► prompt

A response depends on the weights, its prompt, its number and the seed alone, on an engine that honours seeds. So it
does not matter how often the process was killed, how many shards there are, or which worker sampled it.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.schema import Prompt
from headway.deploy.run.run_directory import held
from headway.learner.backends.adapter import open_weights
from headway.learner.config import ModelConfig
from headway.learner.data.prompts.cursor import group_at
from headway.learner.data.prompts.files import Row, RowFields, is_null, named_fields, names_of, read_rows, to_items
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.disk import append_line, cut_torn_line, free_mib, replace_file
from headway.learner.models.pretrained import load_tokenizer
from headway.rollout_workers.decoding import Decoding, response_text
from headway.rollout_workers.evaluation import gather_or_cancel, held_out_request
from headway.rollout_workers.samples.generation import generate, sample_seed
from headway.rollout_workers.samples.recorder import Recorder

from .trained_model import GenerationSettings, TrainedModel, open_trained, own_decoding


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled response."""

    text: str
    """Without the token that ended it."""
    tokens: int
    """With that token."""
    finish_reason: Literal["stop", "length"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with all of its responses."""

    index: int
    """The prompt's place in its file, from 0."""
    prompt: str
    """The text that the model read."""
    prompt_tokens: int
    responses: tuple[Response, ...]
    model: str
    """The directory of the model."""
    made_from: str
    """A digest of the weights, the prompts and the settings, equal in all lines of a file."""


class AnswersError(HeadwayError):
    """The file cannot be written; the message has the remedy."""


class AnswerFile:
    """The answers that a file holds, and a way to add more."""

    def __init__(self, path: Path, made_from: str) -> None:
        """Read the file, if there is one, and cut a line that a killed process has torn. Raises ConfigError where it
        holds something else than answers made from the same."""
        self._path = path
        self.made_from = made_from
        self.done: set[int] = set()
        """The prompts that the file holds, by index."""
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            cut_torn_line(path)
        for answer in self._lines():
            self.done.add(answer.index)

    def add(self, answer: Answer) -> None:
        """Append a prompt. Raises AnswersError, and leaves the file as it was."""
        assert answer.index not in self.done
        with self._writing():
            append_line(self._path, msgspec.json.encode(answer))
        self.done.add(answer.index)

    def put_in_order(self) -> None:
        """Bring the lines into the order of the prompts, durably. Raises AnswersError, and leaves the file as it
        was."""
        lines = sorted((answer.index, msgspec.json.encode(answer)) for answer in self._lines())
        with self._writing():
            replace_file(self._path, b"".join(line + b"\n" for _, line in lines))

    def _lines(self) -> Iterator[Answer]:
        content = self._path.read_bytes().splitlines() if self._path.exists() else []
        for number, line in enumerate(content, start=1):
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{self._path}:{number} is no answer of `headway generate`: {error}. Choose another --out."
                ) from error
            if answer.made_from != self.made_from:
                raise ConfigError(
                    f"{self._path} holds answers by {answer.model} that were made from other weights, prompts or"
                    " settings. Choose another --out, or remove the file."
                )
            yield answer

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, HeadwayError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            reason = getattr(cause, "strerror", None) or str(error)
            raise AnswersError(
                f"{self._path} could not be written: {reason} ({free_mib(self._path):.0f} MiB are free there). Make"
                " room, or make the place writable, and run the same command again: it goes on with what is missing."
            ) from error


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Every `count`-th prompt, from the one with index `number` - 1 on."""

    number: int = 1
    count: int = 1

    def holds(self, index: int) -> bool:
        return index % self.count == self.number - 1


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """The work that one process has done."""

    out: str
    model: str
    prompts: int
    """The prompts of the shard, all of them in the file now."""
    found: int
    """Those that an earlier process had left there."""
    responses: int
    """The responses that this process sampled."""
    response_tokens: int


Add = Callable[[int, Sequence[Response]], None]
"""(index of a prompt, its responses in order): writes the prompt's line. Called from one thread."""


class ResponseSampler(Protocol):
    """Samples the responses to prompts."""

    def sample(self, prompts: Mapping[int, Prompt], add: Add, *, made_from: str) -> None:
        """Sample every prompt `num_samples` times, and give it to `add`, once, as soon as it is done. The keys are the
        places of the prompts in their file. `made_from`: 16 hexadecimal digits, a digest of all that decides the
        responses. Raises HeadwayError."""
        ...


@dataclass(kw_only=True)
class BatchInference:
    """One run over a file of prompts."""

    model: TrainedModel
    prompts: Path
    out: Path
    settings: GenerationSettings
    sampler: ResponseSampler
    samples: int = 1
    """Responses to each prompt."""
    seed: int = 0
    shard: Shard = Shard()
    report: Callable[[int, int], None] = lambda done, all_: None
    """Called with the number of prompts that are done, and of all, after each."""

    def run(self) -> Generated:
        """Generate what the file of answers lacks. Raises HeadwayError, and ConfigError before anything is
        generated."""
        prompts = self._prompts()
        wanted = [index for index in range(len(prompts)) if self.shard.holds(index)]
        tokens: list[int] = []
        with held(self.out, "--out"):
            answers = AnswerFile(self.out, self._made_from(prompts))
            found = len(answers.done)

            def add(index: int, responses: Sequence[Response]) -> None:
                answers.add(self._answer(index, prompts[index], responses, answers.made_from))
                tokens.extend(response.tokens for response in responses)
                self.report(len(answers.done), len(wanted))

            if missing := {index: prompts[index] for index in wanted if index not in answers.done}:
                self.sampler.sample(missing, add, made_from=answers.made_from)
            answers.put_in_order()
        return Generated(
            out=str(self.out),
            model=str(self.model.path),
            prompts=len(wanted),
            found=found,
            responses=len(tokens),
            response_tokens=sum(tokens),
        )

    def _prompts(self) -> list[Prompt]:
        """Render all prompts of the file. Raises ConfigError for one that leaves the model no room to answer."""
        recipe, most = self.model.recipe, self.settings.engine.max_model_len
        tokenizer = load_tokenizer(ModelConfig(path=str(self.model.path)))
        renderer = Renderer(tokenizer, "" if recipe is None else recipe.prompts.system_prompt)
        kind = "parquet" if self.prompts.suffix == ".parquet" else "jsonl"
        fields = named_fields({} if recipe is None else recipe.prompts.options)
        rows = (
            (place, _with_prompt(place, row, fields.prompt_field))
            for place, row in read_rows(kind, str(self.prompts), "PROMPTS")
        )
        rendered: list[Prompt] = []
        for item in to_items(rows, RowFields(tags=fields.tags), self.prompts.name):
            group = group_at((0, len(rendered)))
            rendered.append(prompt := renderer.prompt(item, group=group, num_samples=self.samples))
            if len(prompt.token_ids) >= most:
                raise ConfigError(
                    f"{item.place}: the prompt has {len(prompt.token_ids)} tokens, and engine.max_model_len={most} is"
                    " for prompt and response together. Raise it, or shorten the prompt."
                )
        return rendered

    def _made_from(self, prompts: Sequence[Prompt]) -> str:
        """Return a digest of all that decides the answers."""
        tensors = open_weights(str(self.model.path))
        stats = [(path.name, path.stat()) for path in (tensors.paths if tensors else ())]
        weights = [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
        settings = (self.settings.sampling, self.settings.engine.max_model_len, self.samples, self.seed)
        parts = (str(self.model.path), weights, settings, self.shard.number, self.shard.count)
        digest = hashlib.blake2b(msgspec.json.encode(parts), digest_size=8)
        for prompt in prompts:
            digest.update(msgspec.json.encode(prompt.token_ids))
        return digest.hexdigest()

    def _answer(self, index: int, prompt: Prompt, responses: Sequence[Response], made_from: str) -> Answer:
        return Answer(
            index=index,
            prompt=prompt.text,
            prompt_tokens=len(prompt.token_ids),
            responses=tuple(responses),
            model=str(self.model.path),
            made_from=made_from,
        )


@dataclass(frozen=True, kw_only=True)
class EngineSampler:
    """Samples with one engine in this process."""

    model: TrainedModel
    settings: GenerationSettings
    seed: int = 0

    def sample(self, prompts: Mapping[int, Prompt], add: Add, *, made_from: str) -> None:
        """See ResponseSampler."""
        asyncio.run(self._sample(prompts, add))

    async def _sample(self, prompts: Mapping[int, Prompt], add: Add) -> None:
        decoding = own_decoding(ModelConfig(path=str(self.model.path)), self.settings.sampling)
        engine = await open_trained(self.model, self.settings, self.seed)
        places, queue = asyncio.Semaphore(engine.capacity), iter(prompts.items())

        async def respond(index: int, number: int) -> Response:
            recorder, prompt = Recorder(), prompts[index]
            request = held_out_request(index, number, prompt, self.settings.sampling, decoding)
            seed = sample_seed(self.seed, prompt.group, number)
            async with places:
                await generate(engine, msgspec.structs.replace(request, seed=seed), recorder)
            return response_of(decoding, recorder.tokens, recorder.finished())

        async def work() -> None:
            for index, prompt in queue:
                add(index, await gather_or_cancel([respond(index, number) for number in range(prompt.num_samples)]))

        try:
            await gather_or_cancel([work() for _ in range(min(engine.capacity, len(prompts)))])
        finally:
            await engine.close()


def _with_prompt(place: str, row: Row, column: str) -> Row:
    """Return the row with its prompt in `prompt`: that of the column that the run trains on, if the row has it. Raises
    ConfigError for a row without a prompt."""
    prompt = row.get("prompt") if row.get(column) is None else row[column]
    if prompt is None:
        for name in (column, "prompt"):
            if name in row:
                raise is_null(place, name)
        searched = (
            "'prompt'" if column == "prompt" else f"'prompt' and no {column!r}, the run's prompts.options.prompt_field"
        )
        raise ConfigError(
            f"{place}: no {searched}; the row has {names_of(row)}. A row needs 'prompt', a text or a list of messages."
        )
    return {**row, "prompt": prompt, "ground_truth": ""}


def response_of(decoding: Decoding, tokens: Sequence[int], finish_reason: Literal["stop", "length"]) -> Response:
    """Return the response that consists of `tokens`."""
    return Response(text=response_text(decoding, tokens), tokens=len(tokens), finish_reason=finish_reason)
