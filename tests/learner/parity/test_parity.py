"""Layouts in which every pair of dimensions meets; `make parity` runs all of them."""

import functools
from collections.abc import Callable, Iterator

import pytest

from .cases import RECOMPUTE, Case, Setting, all_layouts
from .comparison import Comparison
from .finding import Finding
from .layouts import covering, dimensions, pairs

FindingsOf = Callable[[str], dict[str, Finding]]
"""By case, of a backend's cases, which run when the first of them is asked for."""

PROCESSES = 4
MODELS = {"megatron": {"qwen3_moe": pairs, "qwen3": dimensions}, "fsdp": {"qwen3_moe": dimensions}}
"""Dense layers are split as those between experts are, so fewer layouts show whatever they have of their own. The few
layouts of fsdp are all in test_fsdp.py; here it only resumes what other layouts saved."""


def _cases() -> Iterator[Case]:
    """On one process, whose checkpoint is then resumed by four; every other layout recomputes its layers."""
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
@pytest.mark.timeout(900)  # the first waits for all of its backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_computes_what_transformers_computes(case: Case, findings: FindingsOf) -> None:
    assert not findings(case.backend)[case.name].problems
