"""`headway doctor` answers on any machine, on broken installations too."""

import io
import json
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.broker.installation import TorchFacts, version_of
from headway.deploy.cli import doctor
from headway.deploy.terminal import Terminal
from headway.rollout_workers.engines import ENGINES
from headway.rollout_workers.engines.abilities import SGLANG
from headway.weightsync.transports.base import TRANSPORTS


def test_the_report_of_this_machine() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "headway", "doctor", "--json"], capture_output=True, text=True, check=True
    )
    report = json.loads(answer.stdout)
    found = {finding["name"]: finding["works"] for finding in report["servers"] + report["backends"]}
    assert found == {
        "embedded": True,
        "fsdp": True,
        "megatron": find_spec("megatron") is not None,
        "bitsandbytes": find_spec("bitsandbytes") is not None,
        "flash-attn-4": version_of("flash-attn-4") is not None,
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
    assert not doctor._findings(ENGINES, facts)[0].works
    assert "no torch" in doctor._machine(facts)[2].detail
    assert not any(transport.works for transport in doctor._findings(TRANSPORTS, facts))


def test_packages_of_extras_are_installed_by_their_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda _: None)
    monkeypatch.setattr(doctor, "_ask_torch", TorchFacts)
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    report = doctor.examine()
    parts = [*report.backends, *report.rewards, *report.displays]
    found = {part.name: part.remedy for part in parts if "[" in part.remedy and "missing" in part.detail}
    assert found == {
        "bitsandbytes": "pip install 'headway[quantized]'",
        "flash-attn-4": "pip install 'headway[flash-attn]'",
        "reasoning-gym": "pip install 'headway[reasoning-gym]'",
        "matplotlib": "pip install 'headway[plots]'",
        "textual": "pip install 'headway[top]'",
    }
    for name, remedy in found.items():
        extra = remedy.split("[")[1].split("]")[0]
        assert any(one.startswith((f"{name}==", f"{name}>=")) for one in extras[extra])


@pytest.mark.parametrize(
    ("files", "works", "said"),
    [
        (["sgl_kernel/flash_ops.abi3.so", "flashinfer/__init__.py"], True, ["sglang 0.5.17"]),
        (["flashinfer/__init__.py"], False, ["FA3", "attention_backend=triton"]),
        (["sgl_kernel/flash_ops.abi3.so"], False, ["flashinfer", "sampling_backend=pytorch"]),
        ([], False, ["attention_backend=triton", "sampling_backend=pytorch"]),
    ],
)
def test_sglang_lacks_kernels(
    files: list[str], works: bool, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for its packages are found before installed ones, and an installed flashinfer is not looked at."""
    metadata = "sglang-0.5.17.dist-info/METADATA"
    for name in ("sgl_kernel/__init__.py", metadata, *files):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n" * (name == metadata))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found, detail = SGLANG.examine(TorchFacts(version="2.11", gpus=("a GPU",)))
    assert found is works
    assert all(part in detail for part in said)
    assert SGLANG.examine(TorchFacts(version="2.11")) == (False, "sglang 0.5.17, and no GPU")


def test_sglang_without_any_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang-0.5.17.dist-info").mkdir()
    (tmp_path / "sglang-0.5.17.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.17\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = SGLANG.examine(TorchFacts(version="2.11", gpus=("a GPU",)))
    assert found == (False, "sglang 0.5.17; no sgl_kernel, without which it does not start")


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
        machine=(),
        servers=(),
        engines=(finding,),
        backends=(fine,),
        transports=(),
        scorers=(),
        rewards=(),
        displays=(),
        ready=False,
    )
    console = Terminal(record=True, width=100, file=io.StringIO())
    console.print(doctor.report_tables(report))
    text = console.export_text()
    assert "pip install [vllm]" in text
    assert "never shown" not in text
    assert "Not ready" in text
