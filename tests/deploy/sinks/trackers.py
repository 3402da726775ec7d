"""Read back the offline files of experiment trackers, each with its own package, as a program in a fresh process.

python -m tests.deploy.sinks.trackers write|read KIND DIRECTORY
"""

import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.observe.sinks import open_sinks
from headway.deploy.recipe.recipe import SinkConfig
from headway.deploy.run.events import HeartbeatEvent, StepEvent
from headway.deploy.run.record import METRICS, read_lines
from tests.deploy.runs import evaluation, run_status, sink_run, step_event, step_metrics

IDENTITY = "0123456789abcdef"
Curves = dict[str, dict[int, float]]
"""The value at every step, by tag."""


def judged(step: int, incarnation: int, reward: float) -> StepEvent:
    """Return a step whose rewards call their measures as they like, and measure more than one request may hold."""
    named = {"right": 0.5, "right/pass@1": 0.25, "right/a: b, c": 0.75, "right/..//x": 0.125}
    event = step_event(step, incarnation=incarnation, reward=reward)
    rewards = named | {f"right/{number}": 1.0 for number in range(1000)}
    return replace(event, metrics=replace(event.metrics, reward=rewards))


def write(kind: str, directory: Path) -> None:
    """Write a run of three steps, which is resumed for a fourth."""
    for steps, incarnation in ((range(3), 1), (range(3, 4), 2)):
        configs = (SinkConfig(kind="jsonl"), SinkConfig(kind=kind, options=_options(kind, directory)))
        with open_sinks(configs, sink_run(directory / "run", IDENTITY)) as sinks:
            for step in steps:
                sinks.write(judged(step, incarnation, step / 4))
            sinks.write(evaluation(incarnation, steps[-1], 0.25))
            sinks.write(HeartbeatEvent.of(run_status(), step_metrics(steps[-1])))
            for lane in sinks._others:  # a first import may take longer than a run's end waits
                lane.end()
                lane.join(240)
        assert not any(sinks.lost.values()), sinks.lost


def _options(kind: str, directory: Path) -> dict[str, str]:
    own = {"wandb": {"mode": "offline"}, "mlflow": {"tracking_uri": mlflow_store(directory)}}
    return own.get(kind, {})


def mlflow_store(directory: Path) -> str:
    """Return the URL of a store without a server.

    MLflow takes a directory of files only with MLFLOW_ALLOW_FILE_STORE=true.
    """
    return f"sqlite:///{directory}/mlflow.db"


def read(kind: str, directory: Path) -> Curves:
    """Return all curves of the only run that the tracker has."""
    readers = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
    return readers[kind](directory)


def _wandb(directory: Path) -> Curves:
    from wandb.proto import wandb_internal_pb2

    curves: Curves = {}
    for file in sorted((directory / "run").rglob("*.wandb")):
        assert file.name == f"run-{IDENTITY}.wandb"
        for frame in _frames(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(frame)
            said = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for tag, value in said.items():
                curves.setdefault(tag, {})[int(said["step"])] = value
    return {tag: curve for tag, curve in curves.items() if "/" in tag}


def _frames(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of 32 KiB, parts with checksum, length and kind."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def _mlflow(directory: Path) -> Curves:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_store(directory))
    experiment = client.get_experiment_by_name("headway")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("arithmetic", "FINISHED")
    return {
        tag: {point.step: point.value for point in client.get_metric_history(run.info.run_id, tag)}
        for tag in run.data.metrics
    }


def _trackio(directory: Path) -> Curves:
    import trackio

    (run,) = trackio.Api().runs("headway")
    assert run.name == f"arithmetic-{IDENTITY}"
    curves: Curves = {}
    for row in trackio.SQLiteStorage.get_logs("headway", run.name):
        for tag, value in row.items():
            if "/" in tag:
                curves.setdefault(tag, {})[row["step"]] = value
    return curves


def main() -> None:
    what, kind, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if what == "write":
        write(kind, directory)
        assert len(read_lines(directory / "run" / METRICS, StepMetrics)) == 4
    else:
        print(json.dumps(read(kind, directory)))
        sys.stdout.flush()
    os._exit(0)  # a tracker's threads may live on


if __name__ == "__main__":
    main()
