"""The model's config and tokenizer, fetched from the broker, so that a worker needs no shared file system."""

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

from headway.broker.client.broker import Broker, Outages
from headway.broker.errors import HeadwayError
from headway.broker.schema.weights import ModelFiles

POLL_S = 0.2
SUFFIXES = frozenset({".bpe", ".jinja", ".json", ".md", ".model", ".tiktoken", ".txt", ".vocab"})
"""The suffixes of files that tokenizers and configs consist of. They are data: nothing executes them."""
TEMPLATES = "additional_chat_templates"
"""The only folder that a tokenizer has."""

log = logging.getLogger(__name__)


class ModelFilesError(HeadwayError):
    """The learner stored a file that a worker refuses to write."""


class FetchedModel(NamedTuple):
    """The model without its weights, as a worker has it."""

    directory: Path
    end_tokens: tuple[int, ...]
    """The tokens at which a response ends."""


async def fetch_model(broker: Broker, directory: Path) -> FetchedModel:
    """Wait for the run's model files and write them to a new `directory/model` that only this user can read. From then
    on the broker's client refuses segments that cannot be of this model."""
    outages = Outages(broker.url)
    files = await outages.retry_until_available(broker.versions.model)
    if files is None:
        log.info("run %s has no model yet; waiting for its learner", broker.run)
    while files is None:
        await asyncio.sleep(POLL_S)
        files = await outages.retry_until_available(broker.versions.model)
    broker.leases.limits = files.limits
    return FetchedModel(await asyncio.to_thread(write_model, files, directory / "model"), files.end_tokens)


def write_model(files: ModelFiles, directory: Path) -> Path:
    """Write the files. They come over the network, so it raises ModelFilesError for a name that could leave `directory`
    and for a file that could be executed."""
    for name in files.files:
        plain = name.removeprefix(f"{TEMPLATES}/")
        if Path(plain).name != plain or plain in ("", ".", "..") or "\\" in plain or "\0" in plain:
            raise ModelFilesError(
                f"the run's model has a file named {name!r}; only plain names without folders are written"
            )
        if Path(name).suffix not in SUFFIXES:
            raise ModelFilesError(
                f"the run's model has a file named {name!r}; only configurations and tokenizers are written"
                f" ({', '.join(sorted(SUFFIXES))}), no code and no weights"
            )
    directory.mkdir(mode=0o700, parents=True)
    for name, content in files.files.items():
        (directory / name).parent.mkdir(mode=0o700, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory
