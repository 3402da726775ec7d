"""LLaMA-Factory's `dataset_info.json`, which says what the columns and roles of a file are called."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import did_you_mean
from headway.learner.data.texts.messages import Tags

FILE_NAME = "dataset_info.json"
_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations"},
}
"""Their name of a column -> ours, which is also the file's where the description names none."""
_SHARED = {"system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected", "kto_tag": "kto_tag"}
_MEDIA = ("images", "videos", "audios")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A data set's description of its file."""

    file: Path
    layout: str
    columns: dict[str, str]
    """Our name of a column -> the file's."""
    tags: Tags


def describe(directory: Path, name: str, where: str) -> Description:
    """Returns the description of the data set `name`. Raises ConfigError if there is none, or none of a text file."""
    stated = _stated(directory, where)
    if name not in stated:
        known = ", ".join(list(stated)[:20])
        told = (
            f"has no data set {name!r}{did_you_mean(name, stated) or '.'}" if name else "describes several data sets."
        )
        raise ConfigError(
            f"{where}: {directory / FILE_NAME} {told} Set options.dataset (for `headway data inspect`: --dataset) to"
            f" one of: {known}."
        )
    entry = stated[name]
    if "file_name" not in entry:
        hub = entry.get("hf_hub_url")
        raise ConfigError(
            f"{where}: the data set {name!r} is no file here."
            + (f" Give its id as the path: hf:{hub}." if hub else " Download it, and give the file's path.")
        )
    return _description(directory, name, entry, where)


def described(file: Path, where: str) -> Description | None:
    """Returns the description of a file that stands in the `dataset_info.json` beside it; None without one."""
    if not (file.parent / FILE_NAME).is_file() or (file.parent / "state.json").exists():
        return None
    for name, entry in _stated(file.parent, where).items():
        if isinstance(entry, dict) and entry.get("file_name") == file.name:
            return _description(file.parent, name, entry, where)
    return None


def _stated(directory: Path, where: str) -> Mapping[str, Any]:
    try:
        stated = json.loads((directory / FILE_NAME).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {directory / FILE_NAME} cannot be read: {error}.") from error
    if not isinstance(stated, dict):
        raise ConfigError(f"{where}: {directory / FILE_NAME} is no object with a description for each data set.")
    return stated


def _description(directory: Path, name: str, entry: Mapping[str, Any], where: str) -> Description:
    form = entry.get("formatting", "alpaca")
    form = "sharegpt" if form == "openai" else form
    if form not in _COLUMNS:
        raise ConfigError(
            f"{where}: the data set {name!r} has the formatting {form!r}. Known: alpaca, sharegpt, openai."
        )
    stated = entry.get("columns", {})
    if media := [medium for medium in _MEDIA if stated.get(medium)]:
        raise ConfigError(f"{where}: the data set {name!r} has {' and '.join(media)}. Headway trains on text alone.")
    names = _COLUMNS[form] | _SHARED
    columns = {ours: stated.get(theirs, ours if not stated else "") for theirs, ours in names.items()}
    if form == "alpaca" and stated and not stated.get("response") and not entry.get("ranking"):
        return Description(
            file=directory / entry["file_name"], layout="text", columns={"text": stated["prompt"]}, tags=Tags()
        )
    suffix = "_preference" if entry.get("ranking") else "_labelled" if stated.get("kto_tag") else ""
    try:
        tags = msgspec.convert(entry.get("tags", {}), Tags)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: the tags of the data set {name!r} are wrong: {error}.") from error
    return Description(
        file=directory / entry["file_name"],
        layout=form + suffix,
        columns={ours: theirs for ours, theirs in columns.items() if theirs and ours != theirs},
        tags=tags,
    )
