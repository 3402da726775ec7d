"""One path for each model configuration, as vLLM's compiled code is kept by the path of the model.

A worker writes the run's configuration into a directory of its own, with a new name every time. Under that name vLLM
would find nothing of what it has compiled before, by this worker or by another one, and compile for 20 s again.
"""

import logging
import os
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from headway.broker.installation import cache_directory

FILES = ("config.json", "generation_config.json", "hf_quant_config.json")
"""The files of a model that vLLM reads without its tokenizer and its weights."""

log = logging.getLogger(__name__)


def kept_configuration(model_dir: Path) -> Path:
    """Return a directory with the configuration of the model in `model_dir`, the same one for the same content;
    `model_dir` itself where the disk has no place for it."""
    files = {name: (model_dir / name).read_bytes() for name in FILES if (model_dir / name).is_file()}
    base = cache_directory()
    if base is None:
        return model_dir
    digest = blake2b(msgspec.msgpack.encode(sorted(files.items())), digest_size=20).hexdigest()
    kept = base / "configurations" / digest
    try:
        if not _has(kept, files):
            _write(kept, files)
        return kept if _has(kept, files) else model_dir
    except OSError as error:
        log.info("the model's configuration is not kept, so vLLM compiles again at the next start: %s", error)
        return model_dir


def _has(directory: Path, files: dict[str, bytes]) -> bool:
    with suppress(OSError):
        return {one.name: one.read_bytes() for one in directory.iterdir()} == files
    return False


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Write the files under another name first: other workers may do the same, or read."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".") as private:
        new = Path(private, "new")
        new.mkdir(mode=0o700)
        for name, content in files.items():
            (new / name).write_bytes(content)
        with suppress(OSError):  # another worker was faster
            os.rename(new, directory)
