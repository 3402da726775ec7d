"""`headway export`: a trained model as the files that vLLM and transformers load, compared with the learner's backend.

DIRECTORY/    model*.safetensors  config.json and all other files of the checkpoint's model

The directory is written under another name beside its place, checked there, and renamed once it is durable.
"""

import functools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import torch

from headway.broker.errors import ConfigError, HeadwayError
from headway.learner.backends import open_backend
from headway.learner.backends.adapter import (
    BASE,
    CONFIG,
    FOLDER,
    WEIGHTS,
    Weights,
    adapted_model,
    has_adapter,
    open_weights,
    trained_base,
)
from headway.learner.backends.hugging_face_files import TensorFiles, write_tensors
from headway.learner.backends.score_head import has_score_head
from headway.learner.batching.packing import PackableSequence, concatenate
from headway.learner.checkpoint import (
    FILES_FILE,
    check_digests,
    partial_path,
    put_in_place,
    read_checkpoint,
)
from headway.learner.config import ModelConfig
from headway.learner.disk import free_mib
from headway.learner.models.model_files import classifier_files, kept_files, write_files
from headway.learner.stages.reward_model import with_state_behind

from .trained_model import TrainedModel, is_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 24
TEXTS = 16
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean absolute difference, by the coarser number format of the two. Rounding alone stays far below; a tensor in the
place of another one changes logprobs, and scores, by about 1."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The distance between the logprobs, or the scores, of two implementations of one model."""

    backend: str
    compared: Literal["logprobs", "scores"] = "logprobs"
    tokens: int
    """The number of tokens whose logprobs, or at which scores, were compared."""
    mean_difference: float
    """The mean of the absolute differences; of logprobs in nats."""
    largest_difference: float
    limit: float
    """The largest mean difference that rounding explains."""

    @property
    def is_close(self) -> bool:
        return self.mean_difference <= self.limit


def limit_of(dtype: str) -> float:
    """Return the largest mean difference that rounding to this number format explains."""
    return LIMITS[getattr(torch, dtype)]


def compare(model: TrainedModel, exported: Path, device: str) -> Agreement:
    """Compare the files in `exported` with the state of the checkpoint `model`, in this process, on `device`.

    Raises CheckpointError where the checkpoint is damaged or holds no learner's state.
    """
    assert model.recipe is not None
    read_checkpoint(model.path)
    check_digests(model.path, 0, 1)
    source = ModelConfig(path=str(model.path), dtype=model.recipe.model.dtype)
    source = adapted_model(source) if has_adapter(model.path) else source
    is_scored = has_score_head(source)
    mine, theirs, exported_dtype = (_scores if is_scored else _logprobs)(model, source, exported, device)
    differences = (mine - theirs).abs()
    coarser = min(exported_dtype, getattr(torch, source.dtype), key=lambda one: one.itemsize)
    return Agreement(
        backend=model.recipe.learner.backend,
        compared="scores" if is_scored else "logprobs",
        tokens=differences.numel(),
        mean_difference=float(differences.mean()),
        largest_difference=float(differences.max()),
        limit=LIMITS[coarser],
    )


def _logprobs(
    model: TrainedModel, source: ModelConfig, exported: Path, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return the backend's and transformers' logprobs of all tokens but first ones, and the exported number format."""
    assert model.recipe is not None
    sequences_BL, theirs_BL, dtype = _by_transformers(exported, device)
    backend = open_backend(model.recipe.learner.backend, source, model.recipe.optimizer, device=device)
    backend.load(model.path)
    batch = concatenate([_packable(tokens) for tokens in sequences_BL.numpy().astype(np.int32)])
    mine_T = backend.logprobs([batch], temperature=1.0)[0].cpu()
    return mine_T.view(sequences_BL.shape)[:, 1:], theirs_BL, dtype


def _scores(
    model: TrainedModel, source: ModelConfig, exported: Path, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return the backend's and transformers' scores of random texts, and the exported number format."""
    from transformers import AutoModelForSequenceClassification

    assert model.recipe is not None
    theirs = AutoModelForSequenceClassification.from_pretrained(exported, dtype="auto").to(device).eval()
    backend = open_backend(model.recipe.learner.backend, source, model.recipe.optimizer, device=device, head="score")
    backend.load(model.path)
    texts_BL = _texts(theirs.config)
    row = concatenate([with_state_behind(tokens) for tokens in texts_BL.numpy().astype(np.int32)])
    mine_B = backend.values([row])[0][row.loss_mask_T > 0].cpu()
    with torch.no_grad():
        theirs_B = theirs(input_ids=texts_BL.to(device)).logits[:, 0].float().cpu()
    return mine_B, theirs_B, theirs.dtype


def _texts(config: "PretrainedConfig") -> torch.Tensor:
    """Return random texts [B, L] without the padding token, before which transformers would read a score."""
    draws = torch.Generator().manual_seed(0)
    ids_BL: torch.Tensor = torch.randint(0, config.vocab_size - 1, (TEXTS, PROMPT_TOKENS + NEW_TOKENS), generator=draws)
    ids_BL += (ids_BL >= config.pad_token_id).long()
    return ids_BL


@torch.no_grad()
def _by_transformers(directory: Path, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return sequences [B, L] that the model itself has sampled, the logprobs [B, L - 1] of all tokens but first ones,
    and the number format of its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device).eval()
    sequences_BL = _sampled(model)
    logits_BLV = model(input_ids=sequences_BL).logits[:, :-1].float()
    logprobs_BL = logits_BLV.log_softmax(-1).gather(2, sequences_BL[:, 1:, None])[..., 0]
    return sequences_BL.cpu(), logprobs_BL.cpu(), model.dtype


def _sampled(model: "PreTrainedModel") -> torch.Tensor:
    """Return sequences [B, L] that continue random tokens: the model finds them likely, whatever its language."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # the model's own may ask for beams, or for no sampling
    with torch.random.fork_rng():
        torch.manual_seed(0)
        prompts = torch.randint(0, model.config.vocab_size, (SEQUENCES, PROMPT_TOKENS)).to(model.device)
        sampled: torch.Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
        )
    return sampled


def _packable(token_ids: "np.typing.NDArray[np.int32]") -> PackableSequence:
    response = len(token_ids) - PROMPT_TOKENS
    return PackableSequence(
        token_ids=token_ids,
        prompt_length=PROMPT_TOKENS,
        loss_mask=np.ones(response, np.uint8),
        behavior_logprobs=np.zeros(response, np.float32),
        lags=np.zeros(response, np.int64),
        advantages=np.zeros(response, np.float32),
    )


def check_has_adapter(model: TrainedModel) -> None:
    """Raise ConfigError for a checkpoint of a whole model."""
    if not has_adapter(model.path):
        raise ConfigError(
            f"{model.path} holds no adapter: its run trained the whole model (model.adapter is null). Leave --adapter"
            " out."
        )


def write_adapter(model: TrainedModel, target: Path, dtype: str | None) -> tuple[str, int]:
    """Write the adapter's two files; return its number format and its number of parameters."""
    source = model.path / FOLDER
    tensors = TensorFiles((source / WEIGHTS,))
    shutil.copyfile(source / CONFIG, target / CONFIG)
    if (source / BASE).exists():
        shutil.copyfile(source / BASE, target / BASE)
    formats: Counter[str] = Counter()
    write_tensors(list(_converted(tensors, dtype, formats)), target)
    (target / "model.safetensors").rename(target / WEIGHTS)
    (target / WEIGHTS).chmod((target / CONFIG).stat().st_mode)  # only its writer could read it; servers are others
    return max(formats, key=lambda kind: formats[kind]), formats.total()


def compare_adapter(model: TrainedModel, exported: Path, device: str, *, written: str) -> Agreement:
    """Compare what the exported adapter, `written` in that number format, makes of its base with the state of the
    checkpoint, as `compare` does."""
    with tempfile.TemporaryDirectory(dir=exported.parent) as directory:
        beside, merged = Path(directory, "beside"), Path(directory, "merged")
        merged.mkdir()
        shutil.copytree(model.path, beside, ignore=shutil.ignore_patterns("training_state", "*.safetensors", FOLDER))
        shutil.copytree(exported, beside / FOLDER)
        write_model(beside, merged)
        found = compare(model, merged, device)
    return msgspec.structs.replace(found, limit=max(found.limit, limit_of(written)))


Dtype = Literal["bfloat16", "float32"]


class ExportError(HeadwayError):
    """A model could not be exported, or the exported files compute something else than the learner's backend."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """The files that were written, and their agreement with the backend."""

    directory: str
    checkpoint: str
    dtype: str
    parameters: int
    bytes: int
    """The size of all files."""
    quantized: str
    """The number format of the base that an adapter was trained beside: nf4, int8, or none."""
    check: Agreement | None
    """None: the caller wanted no comparison."""


def export_model(
    model: TrainedModel,
    directory: Path,
    *,
    dtype: Dtype | None,
    is_checked: bool,
    is_forced: bool,
    device: str = "cpu",
    is_adapter: bool = False,
) -> Export:
    """Write the model, or its adapter alone, to `directory`, whole or not at all. `dtype`: None keeps the files' number
    format.

    Raises ExportError, ConfigError for a directory that must not be replaced, and CheckpointError for a checkpoint that
    the backend cannot load.
    """
    directory = Path(os.path.abspath(directory))  # "." has no name that could be given to another directory
    _refuse_what_holds_something(directory, is_forced)
    if is_checked and model.recipe is None:
        raise ConfigError(
            f"{model.path} is in no run's directory, so it is unknown which backend trained it. --no-check leaves the"
            " comparison out."
        )
    if is_adapter:
        check_has_adapter(model)
    partial = partial_path(directory)
    try:
        with _writing(directory):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if is_adapter:
                written, parameters = write_adapter(model, partial, dtype)
            else:
                written, parameters = write_model(model.path, partial, dtype)
        compared = functools.partial(compare_adapter, written=written) if is_adapter else compare
        check = compared(model, partial, device) if is_checked else None
        if check is not None and not check.is_close:
            raise ExportError(_disagreement(model, check))
        size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        with _writing(directory):
            put_in_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Export(
        directory=str(directory),
        checkpoint=str(model.path),
        dtype=written,
        parameters=parameters,
        bytes=size,
        quantized=trained_base(model.path),
        check=check,
    )


def _refuse_what_holds_something(directory: Path, is_forced: bool) -> None:
    if not directory.exists() and not directory.is_symlink():
        return
    if not is_forced:
        raise ConfigError(f"{directory} exists. Choose another --out, or replace what is there with --force.")
    if (directory / FILES_FILE).exists() or directory.is_symlink():
        raise ConfigError(f"{directory} is a learner's checkpoint or a link; --force does not replace it.")
    if not directory.is_dir() or (
        any(directory.iterdir()) and not (is_model(directory) or (directory / CONFIG).is_file())
    ):
        raise ConfigError(f"{directory} holds something else than a model; --force does not replace it.")


def write_model(source: Path, target: Path, dtype: Dtype | None = None) -> tuple[str, int]:
    """Write all files; return the weights' number format and the number of parameters. Holds one file's tensors at a
    time."""
    tensors = open_weights(str(source))
    if tensors is None:
        raise ExportError(f"{source} has no safetensors files.")
    _write_configuration(source, target, dtype)
    formats: Counter[str] = Counter()
    write_tensors(_converted(tensors, dtype, formats), target)
    for path in target.glob("*.safetensors"):  # which only their writer may read; servers run as other users
        path.chmod((target / "config.json").stat().st_mode)
    return max(formats, key=lambda kind: formats[kind]), formats.total()


def _converted(tensors: Weights, dtype: str | None, formats: Counter[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors by name, floating ones in the number format `dtype` if one is given, and count the numbers of
    each format."""
    for name in sorted(tensors.names):
        tensor = tensors(name)
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, dtype))
        formats[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        yield name, tensor


def _write_configuration(source: Path, target: Path, dtype: Dtype | None) -> None:
    model = ModelConfig(path=str(source))
    kept = _own_config(source)
    write_files((classifier_files if has_score_head(model) else kept_files)(model, dtype=dtype or kept), target)


def _own_config(source: Path) -> str:
    """Return the number format that the model's own config.json names."""
    content = msgspec.json.decode((source / "config.json").read_bytes())
    return str(content.get("dtype") or content.get("torch_dtype") or "float32")


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turn a full disk, or a place that cannot be written, into an ExportError with the remedy."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ExportError(
            f"{directory} could not be written: {reason} ({free_mib(directory):.0f} MiB are free there). Nothing of the"
            " export is left. Make room, or choose another --out."
        ) from error


def _disagreement(model: TrainedModel, check: Agreement) -> str:
    return (
        f"The export of {model.path} is not kept: the {check.compared} of {check.tokens} tokens differ by"
        f" {check.mean_difference:.2g} on average from those of the backend {check.backend}, and {check.limit:g} is the"
        " limit. Is the checkpoint damaged? --no-check exports it as it is."
    )
