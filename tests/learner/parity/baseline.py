"""The values with which every layout is compared, and the distance from them that rounding alone may cause."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from safetensors.torch import load_file

from .cases import Case, Job, Setting
from .launch import launch
from .models import SHAPES, write_model
from .moments import Tensors
from .outcome import Outcome, deviations, merged, outcomes
from .reference import reference

FLOAT32 = {
    "loss": 1e-5,
    "grad_norm": 5e-6,
    "logits": 2e-6,
    "logprobs": 2e-6,
    "parameters": 3e-4,
    "exp_avg": 3e-5,
    "exp_avg_sq": 3e-5,
}
"""Another layout sums in another order.

A parameter moves by the quotient of two moments, in which the smallest gradients count as much as the largest.
"""

ROUNDINGS = 2.0


@dataclass(frozen=True, kw_only=True)
class Baseline:
    expected: Outcome
    start: Tensors
    """The tensors in the model's files."""
    tolerances: dict[str, float]


class Baselines:
    """The expected values: in fp32 those of the reference, in bfloat16 those of the same backend on one process.

    Only the same backend rounds in the same places.
    """

    def __init__(self, directory: Path, setting: Setting) -> None:
        self._directory = directory
        self._setting = setting
        self._made: dict[tuple[str, str], Baseline] = {}

    def model(self, name: str) -> Path:
        """Return the model's Hugging Face directory."""
        directory = self._directory / name
        if not directory.exists():
            write_model(name, SHAPES[self._setting.shape], directory)
        return directory

    def of(self, backend: str, model: str) -> Baseline:
        is_half = self._setting.dtype == "bfloat16"
        key = (backend if is_half else "", model)
        if key not in self._made:
            self._made[key] = self._of_one_process(backend, model) if is_half else self._of_reference(model)
        return self._made[key]

    def _of_reference(self, model: str) -> Baseline:
        directory = self.model(model)
        expected = reference(directory, SHAPES[self._setting.shape])
        return Baseline(expected=expected, start=load_file(directory / "model.safetensors"), tolerances=FLOAT32)

    def _of_one_process(self, backend: str, model: str) -> Baseline:
        """Allow twice the deviation that bfloat16 causes on one process.

        Another layout adds in another order: its rounding errors are another draw of the same size, so two layouts lie
        about sqrt(2) of that apart where nothing cancels, more where the router sends a token to another expert.
        """
        start = load_file(self.model(model) / "model.safetensors")
        half, exact = self._alone(Case(backend=backend, model=model, processes=1), ["bfloat16", "float32"])
        noise = deviations(half, exact, start)
        least = {"loss": noise["exp_avg"], "grad_norm": noise["exp_avg"]}  # a single number may agree by chance
        tolerances = {kind: ROUNDINGS * max(apart, least.get(kind, 0.0)) for kind, apart in noise.items()}
        return Baseline(expected=half, start=start, tolerances=tolerances)

    def _alone(self, case: Case, dtypes: list[Literal["float32", "bfloat16"]]) -> list[Outcome]:
        """Return the outcome of one process in each number format."""
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            settings = {dtype: msgspec.structs.replace(self._setting, dtype=dtype) for dtype in dtypes}
            jobs = [
                Job(case=case, setting=setting, model=self.model(case.model), directory=Path(directory) / dtype)
                for dtype, setting in settings.items()
            ]
            for _, failure in launch(jobs):
                if failure:
                    raise RuntimeError(f"{case.name}, with which others would be compared, fails: {failure}")
            return [merged(list(outcomes(job))) for job in jobs]
