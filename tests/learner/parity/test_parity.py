"""Both backends compute the reference's results in layouts in which every pair of dimensions meets.

`make parity` runs all layouts.
"""

import functools
from collections.abc import Callable, Iterator

import pytest

from .cases import RECOMPUTE, Case, Setting, all_layouts
from .comparison import Comparison
from .finding import Finding
from .layouts import covering, dimensions, pairs

FindingsOf = Callable[[str], dict[str, Finding]]
"""Returns the findings by case, for a backend whose cases run when the first of them is asked for."""

PROCESSES = 4
MODELS = {"megatron": {"qwen3_moe": pairs, "qwen3": dimensions}, "fsdp": {"qwen3_moe": dimensions}}
"""The features of layouts that the cases cover, by backend and model.

Dense layers are split as those between experts are, so fewer layouts show all that is special about them. test_fsdp.py
has all the few layouts of fsdp; here fsdp only resumes checkpoints of other layouts.
"""


def _cases() -> Iterator[Case]:
    """Yield a case on one process, whose checkpoint four then resume; every other layout recomputes its layers."""
    for backend, models in MODELS.items():
        for model, features_of in models.items():
            yield Case(backend=backend, model=model, processes=1)
            layouts = covering(all_layouts(backend, model, PROCESSES, "toy"), PROCESSES, features_of)
            for number, layout in enumerate(layouts):
                recompute = RECOMPUTE[number % len(RECOMPUTE)]
                yield Case(backend=backend, model=model, processes=PROCESSES, layout=layout, recompute=recompute)


CASES = list(_cases())


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> FindingsOf:
    comparison = Comparison(tmp_path_factory.mktemp("parity"), Setting())

    @functools.cache
    def of(backend: str) -> dict[str, Finding]:
        return {finding.name: finding for finding in comparison.run([c for c in CASES if c.backend == backend])}

    return of


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_computes_what_transformers_computes(case: Case, findings: FindingsOf) -> None:
    assert not findings(case.backend)[case.name].problems
