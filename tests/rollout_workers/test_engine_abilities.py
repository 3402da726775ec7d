"""Code asks engines for the abilities that they state, never for their names; a user's own engine states them too."""

import subprocess
import sys
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.recipe.placement import worker_gpus
from headway.deploy.recipe.preflight import check_packages
from headway.deploy.recipe.resolve import load_recipe
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import ENGINES, abilities_of, gpus_of, open_engine
from headway.rollout_workers.engines.abilities import EngineAbilities
from headway.rollout_workers.engines.sglang.open_sglang import open_sglang
from tests import plugged

from .models import make_model, save_config


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's directory with a module of their own."""
    plugged.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugged", raising=False)
    return tmp_path


def test_what_engines_and_transports_state_is_known_without_torch() -> None:
    program = (
        "import sys, headway.rollout_workers.engines, headway.weightsync.transports.base;"
        "import headway.deploy.recipe.validate, headway.learner.backends;"
        "sys.exit(str({'torch', 'vllm', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert asked.stderr.strip() == "set()"


def test_every_engine_that_comes_with_headway_can_be_opened_by_its_path() -> None:
    assert {name: known.opener.partition(":")[2] for name, known in ENGINES.items()} == {
        "embedded": "open_embedded",
        "vllm": "open_vllm",
        "sglang": "open_sglang",
    }
    assert ENGINES["vllm"].abilities.gpu_options == ("tensor_parallel_size", "pipeline_parallel_size")
    assert not ENGINES["vllm"].abilities.takes_stored("worker_cls", "my.Worker")
    assert not ENGINES["sglang"].abilities.takes_stored("custom_weight_loader", "my.load")
    assert ENGINES["sglang"].abilities.takes_stored("attention_backend", "triton")


@pytest.mark.usefixtures("outside")
def test_an_engine_of_ones_own_is_asked_what_it_states() -> None:
    own = EngineConfig(kind=plugged.ENGINE, options={"copies": 3})
    stated = abilities_of(own, ImportRoots())
    assert (stated.gpu_options, stated.sleeps) == (("copies",), False)
    assert gpus_of(own, stated) == 3
    devices = ("engine.options.copies=2", "workers.devices=[4, 5, 6, 7]")
    assert worker_gpus(load_recipe("arithmetic.yaml", [f"engine.kind={plugged.ENGINE}", *devices]), "") == [
        "4,5",
        "6,7",
    ]


def test_an_engine_that_nobody_may_import_is_not_imported_to_be_asked() -> None:
    assert abilities_of(EngineConfig(kind="nowhere:Engine")) == EngineAbilities()
    with pytest.raises(ConfigError, match=r"engine\.kind: 'torch\.hub:load' is not imported"):
        abilities_of(EngineConfig(kind="torch.hub:load"), ImportRoots())


@pytest.mark.usefixtures("outside")
def test_what_an_engine_cannot_do_is_said_before_anything_starts() -> None:
    own = f"engine.kind={plugged.ENGINE}"
    check_packages(load_recipe("arithmetic.yaml", [own]), has_workers=True)
    turns = load_recipe("arithmetic.yaml", [own, "run.placement=colocated"])
    check_packages(turns, has_workers=False)
    with pytest.raises(ConfigError, match=r"needs engines that sleep, and engine\.kind=plugged:ForwardEngine does not"):
        check_packages(turns, has_workers=True)
    with pytest.raises(ConfigError, match=r"router_replay needs an engine that tells which experts"):
        open_engine(EngineConfig(kind=plugged.ENGINE), Path(), seed=0, tells_experts=True)


@pytest.mark.usefixtures("outside")
async def test_what_is_no_engine_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    directory = save_config(make_model("dense", 0), tmp_path / "model")
    await open_engine(EngineConfig(kind=plugged.ENGINE), directory, seed=0).close()
    with pytest.raises(
        ConfigError, match=r"^engine\.kind: 'plugged:Deaf' makes a Deaf, which lacks close, generate, max"
    ):
        open_engine(EngineConfig(kind="plugged:Deaf"), directory, seed=0)
    with pytest.raises(HeadwayError, match="told: sleeps=True"):
        open_engine(EngineConfig(kind="plugged:told"), directory, seed=0, sleeps=True)


@pytest.mark.parametrize("options", [{}, {"dtype": "float"}])
def test_sglang_on_a_gpu_refuses_float32_before_it_starts(
    options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = EngineConfig(kind="sglang", dtype="bfloat16" if options else "float32", options=options)
    with pytest.raises(ConfigError, match=r"set engine\.dtype=bfloat16"):
        open_sglang(config, tmp_path, seed=0)


async def test_options_that_an_engine_states_are_checked_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"^engine\.options\.devices: .* no such option; did you mean engine\.device\?"
    ):
        open_engine(EngineConfig(options={"devices": 1}), tmp_path, seed=0)
    stated = "lambda config, model_dir, *, seed: None"
    source = f"from headway.rollout_workers.engines.abilities import EngineAbilities\nopened = {stated}\n"
    (tmp_path / "stating.py").write_text(f"{source}opened.abilities = EngineAbilities(options=('taste',))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own, roots = EngineConfig(kind="stating:opened", options={"tast": 1}), ImportRoots(("stating:opened",))
    with pytest.raises(ConfigError, match=r"engine\.options\.tast: .* did you mean 'taste'\?"):
        open_engine(own, tmp_path, seed=0, roots=roots)
