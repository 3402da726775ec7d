"""vLLM is given one path for one configuration, wherever a worker has written it."""

from pathlib import Path

import pytest

from headway.rollout_workers.engines.vllm.fork_server import new_processes
from headway.rollout_workers.engines.vllm.open_vllm import cached_configuration

from .marks import VLLM
from .models import make_model, save_config


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headway" / "configurations"


def model(directory: Path, config: str = "{}") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(config)
    (directory / "model.safetensors").write_bytes(b"large")
    return directory


def test_the_same_configuration_has_one_path_and_another_one_its_own(tmp_path: Path, cache: Path) -> None:
    first, second, other = (model(tmp_path / name, config) for name, config in (("a", "{}"), ("b", "{}"), ("c", "[]")))
    kept = cached_configuration(first)
    assert kept == cached_configuration(second)
    assert [one.name for one in kept.iterdir()] == ["config.json"]
    assert cached_configuration(other) != kept
    assert (cached_configuration(other) / "config.json").read_text() == "[]"
    assert kept.stat().st_mode & 0o777 == 0o700
    assert {one.name for one in cache.iterdir()} == {kept.name, cached_configuration(other).name}, (
        "nothing is left over"
    )


def test_what_was_changed_or_cannot_be_kept_is_not_used(tmp_path: Path, cache: Path) -> None:
    first = model(tmp_path / "a")
    kept = cached_configuration(first)
    (kept / "config.json").write_text('{"vocab_size": 1}')
    assert cached_configuration(first) == first
    cache.rename(tmp_path / "away")
    cache.write_text("a file in its place")
    assert cached_configuration(first) == first


class TestVllm:
    pytestmark = VLLM

    def test_it_keys_its_compiled_code_by_content(self, tmp_path: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs

        def key(directory: Path) -> str:
            arguments = {"model": str(directory), "skip_tokenizer_init": True, "load_format": "dummy"}
            with new_processes({}):  # so that no process imports vLLM to look at the model's class
                config = AsyncEngineArgs(**arguments, max_model_len=64, enforce_eager=True).create_engine_config()
            return str(config.model_config.compute_hash())

        dense = make_model("dense", 0)
        first, second = (save_config(dense, tmp_path / name) for name in ("first", "second"))
        assert key(first) != key(second), "a release that keys by content needs no kept configuration"
        assert key(cached_configuration(first)) == key(cached_configuration(second))
