"""`headway doctor` answers on any machine, on broken installations too."""

import io
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from broker.installation import TorchFacts
from deploy.cli import doctor
from deploy.terminal import Terminal


def test_the_report_of_this_machine() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "deploy", "doctor", "--json"], capture_output=True, text=True, check=True
    )
    report = json.loads(answer.stdout)
    found = {finding["name"]: finding["works"] for finding in report["servers"] + report["backends"]}
    assert found == {
        "embedded": True,
        "fsdp": True,
        "megatron": find_spec("megatron") is not None,
        "bitsandbytes": find_spec("bitsandbytes") is not None,
    }
    assert [engine["name"] for engine in report["engines"]] == ["embedded", "vllm", "sglang"]
    assert report["ready"] is True


def test_a_torch_that_does_not_import_is_a_finding(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ImportError: libcudart.so.12: cannot open' >&2\nexit 1\n")
    broken.chmod(0o755)
    facts = doctor._ask_torch(str(broken))
    assert facts == TorchFacts(problem="torch does not import: ImportError: libcudart.so.12: cannot open")
    assert not doctor._backends(facts)[0].works
    assert not doctor._engines(facts)[0].works
    assert "no torch" in doctor._machine(facts)[2].detail
    assert not any(transport.works for transport in doctor._transports(facts))


@pytest.mark.parametrize("answer", ["", "not json", "[1"])
def test_a_torch_that_answers_nonsense_is_a_finding(answer: str, tmp_path: Path) -> None:
    odd = tmp_path / "python"
    odd.write_text(f"#!/bin/sh\necho '{answer}'\n")
    odd.chmod(0o755)
    assert "torch does not import" in doctor._ask_torch(str(odd)).problem


def test_no_torch_program_at_all(tmp_path: Path) -> None:
    assert "No such file" in doctor._ask_torch(str(tmp_path / "nothing")).problem


def test_tables_show_remedies_only_where_something_is_missing() -> None:
    finding = doctor.Finding(name="vllm", works=False, detail="not installed", remedy="pip install [vllm]")
    fine = doctor.Finding(name="fsdp", works=True, detail="torch", remedy="never shown")
    report = doctor.MachineReport(
        machine=(), servers=(), engines=(finding,), backends=(fine,), transports=(), scorers=(), rewards=(), ready=False
    )
    console = Terminal(record=True, width=100, file=io.StringIO())
    console.print(doctor.report_tables(report))
    text = console.export_text()
    assert "pip install [vllm]" in text
    assert "never shown" not in text
    assert "Not ready" in text
