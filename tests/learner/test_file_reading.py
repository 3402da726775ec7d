"""A file whose rows would not fit into memory is refused before one of them is kept, however small the file is."""

import gzip
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from headway.broker.errors import ConfigError
from headway.learner.config import PromptsConfig
from headway.learner.data import file_reading
from headway.learner.data.file_reading import lines_of
from headway.learner.data.prompts import open_source
from headway.learner.data.records import Conversation, open_records

MOST = 50_000_000
ROW = {"prompt": "1+1=", "ground_truth": "2", "completion": "2"}


def packed(path: Path) -> None:
    """Write texts that all are zeros: a thousandth of their size once packed."""
    texts = [str(number) + "0" * 1_000_000 for number in range(60)]
    parquet.write_table(pyarrow.table({"prompt": texts, "completion": texts}), path, compression="zstd")


def repeated(path: Path) -> None:
    """Write one text 1,000 times: the file has it once, and says so."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000), pyarrow.array(["x" * 500_000]))
    parquet.write_table(pyarrow.table({"prompt": texts, "completion": texts}), path)


def nested(path: Path) -> None:
    """Write one list of equal numbers, which take a few bytes in a file, and 40 each as objects of Python."""
    numbers = pyarrow.array([[7] * 2_000_000])
    parquet.write_table(pyarrow.table({"prompt": ["1"], "completion": ["1"], "numbers": numbers}), path)


def in_groups(path: Path) -> None:
    """Write many groups of rows, none of which is large alone."""
    with parquet.ParquetWriter(
        path, pyarrow.schema({"prompt": pyarrow.string(), "completion": pyarrow.string()})
    ) as to:
        for number in range(60):
            texts = [str(number) + "0" * 1_000_000]
            to.write_table(pyarrow.table({"prompt": texts, "completion": texts}))


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reading, "most_bytes", lambda: MOST)


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("write", [packed, repeated, nested, in_groups])
def test_a_parquet_file_that_unpacks_to_more_than_the_bound_is_refused_early(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    write(path)
    assert path.stat().st_size < MOST / 5
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"^prompts\.path: .*rows\.parquet takes at least [\d,]+ bytes"):
            open_source(PromptsConfig(kind="parquet", path=str(path)), 0)
        with pytest.raises(ConfigError, match=r"^here\.path: .*rows\.parquet takes at least [\d,]+ bytes"):
            open_records(Conversation, str(path), {}, "here")
        assert tracemalloc.get_traced_memory()[1] < MOST / 5  # no row was made an object
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("small_memory")
def test_an_arrow_file_is_read_up_to_the_bound(tmp_path: Path) -> None:
    texts, path = ["0" * 1_000_000] * 10, tmp_path / "rows.arrow"
    table = pyarrow.table({"prompt": texts, "completion": texts})
    with pyarrow.ipc.new_file(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as to:
        for _ in range(6):
            to.write_table(table)
    with pytest.raises(ConfigError, match="takes at least"):
        open_records(Conversation, str(path), {}, "here")


def with_numbers(rows: int) -> pyarrow.Table:
    """Return a table of small numbers: a byte of each in Arrow, and 40 as an object of Python."""
    numbers = pyarrow.array([[7] * 2_000_000] * rows, pyarrow.list_(pyarrow.int8()))
    return pyarrow.table({"prompt": ["1"] * rows, "ground_truth": ["2"] * rows, "numbers": numbers})


def with_texts(rows: int) -> pyarrow.Table:
    texts = [f"{number}" + "0" * 30_000_000 for number in range(rows)]
    return pyarrow.table({"prompt": texts, "completion": texts, "ground_truth": texts})


def with_mappings(rows: int) -> pyarrow.Table:
    small = pyarrow.array([{"deep": [{"a": 1}] * 1_300_000}] * rows)
    return pyarrow.table({"prompt": ["1"] * rows, "ground_truth": ["2"] * rows, "numbers": small})


class HubTable:
    """A split as the `datasets` library has it: a table in files, and rows that are made as they are asked for."""

    def __init__(self, table: pyarrow.Table) -> None:
        self.data = table

    def __iter__(self) -> Iterator[object]:
        yield from self.data.to_pylist()


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("table", [with_numbers(1), with_texts(1), with_mappings(1)], ids=["numbers", "texts", "deep"])
def test_a_data_set_of_a_hub_is_measured_before_a_row_is_kept(
    table: pyarrow.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HubTable, "__iter__", lambda self: pytest.fail("a row was made"))
    package = ModuleType("modelscope.msdatasets")
    hub = SimpleNamespace(load_dataset=lambda *_, **__: HubTable(table), load=lambda *_, **__: HubTable(table))
    monkeypatch.setattr(package, "MsDataset", type("MsDataset", (), {"load": hub.load}), raising=False)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setitem(sys.modules, "modelscope", ModuleType("modelscope"))
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", package)
    with pytest.raises(ConfigError, match=r"^prompts\.path: me/sums\[train\] takes at least [\d,]+ bytes"):
        open_source(PromptsConfig(kind="datasets", path="me/sums"), 0)
    for name in ("hf:me/sums", "modelscope:me/sums"):
        with pytest.raises(ConfigError, match=rf"^here\.path: {name}\[train\] takes at least [\d,]+ bytes"):
            open_records(Conversation, name, {}, "here")
    path = tmp_path / "rows.arrow"
    with pyarrow.ipc.new_file(path, table.schema) as to:
        to.write_table(table)
    with pytest.raises(ConfigError, match=r"rows\.arrow takes at least"):
        open_records(Conversation, str(path), {"format": "prompt_completion"}, "here")


def test_a_usual_data_set_of_a_hub_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pyarrow.Table.from_pylist([ROW] * 3)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: HubTable(table)))
    assert open_source(PromptsConfig(kind="datasets", path="me/sums"), 0).size == 3
    assert len(open_records(Conversation, "hf:me/sums", {"format": "prompt_completion"}, "here")) == 3


@pytest.mark.parametrize("pack", [gzip.compress, lambda text: b"\x28\xb5\x2f\xfd" + text, lambda text: b"BZh9" + text])
def test_packed_lines_are_refused_with_what_unpacks_them(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(pack(json.dumps(ROW).encode()))
    with pytest.raises(ConfigError, match=r"prompts\.path: .* is packed by \w+\. Unpack it with"):
        open_source(PromptsConfig(kind="jsonl", path=str(path)), 0)
    with pytest.raises(ConfigError, match=r"here\.path: .* is packed by \w+\. Unpack it with"):
        open_records(Conversation, str(path), {}, "here")


@pytest.mark.usefixtures("small_memory")
def test_lines_that_are_too_long_or_too_many_are_refused_by_their_size(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(MOST + 1)
    with pytest.raises(ConfigError, match=r"takes at least 50,000,001 bytes"):
        open_source(PromptsConfig(kind="jsonl", path=str(path)), 0)


def test_a_line_over_the_bound_is_passed_without_being_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"ab\n" + b"x" * 300_000 + b"\n\nabcd\nabcde")
    assert list(lines_of(path, 4)) == [
        (1, b"ab\n", 3),
        (2, b"", 300_001),
        (3, b"\n", 1),
        (4, b"abcd\n", 5),
        (5, b"", 5),
    ]
    path.write_bytes(json.dumps(ROW).encode() + b"\n" + b"y" * 64_000_001 + b"\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: the line has 64,000,002 bytes"):
        open_source(PromptsConfig(kind="jsonl", path=str(path)), 0)


def test_a_usual_file_is_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([ROW] * 3), path)
    assert open_source(PromptsConfig(kind="parquet", path=str(path)), 0).size == 3
