# mypy: disable-error-code="attr-defined"
"""The reference describes every key, command and field that it lists."""

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from .pages import ROOT


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_key_of_a_recipe_has_its_sentence(generate: ModuleType) -> None:
    keys = list(generate.config_keys())
    assert len(keys) > 100
    assert not [key.path for key in keys if len(key.meaning) < 8]


def test_a_key_is_listed_with_type_bounds_and_default(generate: ModuleType) -> None:
    key = next(key for key in generate.config_keys() if key.path == "broker.lease_ttl_s")
    assert (key.kind, "2,592,000" in key.bounds, "`30.0`" in key.default) == ("number", True, True)


def test_keys_of_a_list_s_items_are_listed(generate: ModuleType) -> None:
    paths = {key.path for key in generate.config_keys()}
    assert {"rewards[].kind", "sft.phases[].path", "algorithm.corrections[].kind", "model.random.architecture"} <= paths


def test_every_command_and_option_has_its_sentence(generate: ModuleType) -> None:
    from headway.deploy.cli.main import cli

    silent = []
    for command, context in generate.shown_commands(cli):
        silent += [] if command.help else [context.command_path]
        silent += [
            f"{context.command_path} {option.name}"
            for option in command.params
            if option.param_type_name == "option" and not (option.help or option.hidden)
        ]
    assert not silent


def test_every_algorithm_has_its_equation_and_every_preset_its_source(generate: ModuleType) -> None:
    from headway.learner.objective.catalog import compositions, functions

    assert not [one.name for one in functions() if not one.equation]
    assert not [one.name for one in compositions() if not (one.source or one.note)]
    page = generate.algorithms()
    names = [one.name for one in functions()] + [one.name for one in compositions()]
    assert not [name for name in names if f"\n`{name}`\n" not in page]


def test_every_metric_has_its_sentence(generate: ModuleType) -> None:
    assert not [field.name for field in generate.wire_structs()["StepMetrics"][1] if not field.meaning]


def test_every_metric_that_prometheus_reads_is_listed(generate: ModuleType) -> None:
    page = generate.metrics()
    modules = "".join(path.read_text() for path in generate.PROMETHEUS.glob("*_metrics.py"))
    names = set(re.findall(r'"(headway_\w+)"', modules))
    assert len(names) > 90
    assert not [name for name in names if f"| `{name}` | " not in page and f"| `{name}_info` | " not in page]


def test_every_struct_that_crosses_a_process_says_what_it_is(generate: ModuleType) -> None:
    assert not [name for name, (meaning, _) in generate.wire_structs().items() if not meaning]


def test_the_table_of_redis_keys_is_read_whole(generate: ModuleType) -> None:
    import headway.broker.keys

    page = generate.keys()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert all(line.count(" | ") == 4 for line in rows)
    assert "| `payload:G:R:I:NONCE` | string |" in page
    assert "Fields of `group:G`" in page
    assert headway.broker.keys.__doc__ is not None


def test_every_test_that_a_guarantee_names_exists(generate: ModuleType) -> None:
    linked = generate.linked_tests()
    assert len(set(linked)) > 30
    assert not [anchor for anchor in linked if not generate.linked_test_path(anchor).is_file()]


def test_every_fault_names_its_tests() -> None:
    faults = (ROOT / "docs" / "guarantees.md").read_text().split("\n### ")[1:]
    assert len(faults) > 30
    assert not [
        fault.splitlines()[0] for fault in faults if "**Promised:**" not in fault or "**Shown by**" not in fault
    ]
