"""GB/s at which workers pull a version from the learner's server, with TLS and without.

    python -m benchmarks.pulls [--gib 1] [--workers 1] [--rounds 3] [--bucket-mib 64]

The server and every worker are processes of their own on this machine, so the line is the loopback and processors are
the limit; each worker fetches, verifies and forgets the version, once for warming up. The last line is one JSON
object: medians, and the processor's seconds at the server for each GB.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe, WeightManifest
from headway.weightsync.limits import Deadline
from headway.weightsync.puller import Puller
from headway.weightsync.tensors.staging import stage
from headway.weightsync.transports.http.client import HttpPull
from headway.weightsync.transports.http.server import PullServer

_TIMEOUT_S = 60.0
_VERSION = WeightVersion(1, 0)


def serve(gib: float, bucket_mib: int, tls: bool, connection: Connection) -> None:
    """Send the manifest, and answer each message with the processor seconds that this process took so far."""
    bucket_bytes, numel = bucket_mib << 20, int(gib * (1 << 30)) // 4
    whole = torch.arange(numel, dtype=torch.int32).view(torch.float32)
    weights = stage(
        [(str(index), part) for index, part in enumerate(torch.split(whole, bucket_bytes // 4))], bucket_bytes
    )
    server = PullServer("127.0.0.1", "secret", _TIMEOUT_S, tls=tls)
    server.serve(_VERSION, weights.buckets)
    manifest = WeightManifest(
        version=_VERSION,
        tensors=weights.tensors,
        buckets=weights.sizes,
        fingerprints=weights.fingerprints,
        probe=Probe(token_ids=[1], logprobs=[], tolerance=0.0),
        group_epoch=0,
        pull_url=server.url,
        pull_token="secret",
        pull_certificate=server.certificate,
    )
    connection.send_bytes(msgspec.msgpack.encode(manifest))
    while connection.recv_bytes():
        connection.send(time.process_time())
    server.close()


def pull(connection: Connection) -> None:
    """Receive the manifest, then pull at every message, and send the seconds that it took."""
    torch.set_num_threads(1)
    manifest = msgspec.msgpack.decode(connection.recv_bytes(), type=WeightManifest)
    landing = tuple(torch.empty(nbytes, dtype=torch.uint8) for nbytes in manifest.buckets)
    puller = Puller(HttpPull(_TIMEOUT_S), keeps_base=False)
    while connection.recv_bytes():
        begun = time.perf_counter()
        puller.pull(manifest, Deadline(math.inf), landing)
        connection.send(time.perf_counter() - begun)


def measure(arguments: argparse.Namespace, tls: bool) -> dict[str, float]:
    """Return medians over the rounds; all workers pull at the same time."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for target, given in [(serve, (arguments.gib, arguments.bucket_mib, tls))] + [(pull, ())] * arguments.workers:
        end, other = context.Pipe()
        processes.append(context.Process(target=target, args=(*given, other), daemon=True))
        processes[-1].start()
        ends.append(end)
    server, *workers = ends
    manifest = server.recv_bytes()
    for worker in workers:
        worker.send_bytes(manifest)
    nbytes = sum(msgspec.msgpack.decode(manifest, type=WeightManifest).buckets) * arguments.workers
    rates, costs = [], []
    for _ in range(arguments.rounds + 1):
        before = _ask(server)
        begun = time.perf_counter()
        for worker in workers:
            worker.send_bytes(b"!")
        for worker in workers:
            worker.recv()
        rates.append(nbytes / (time.perf_counter() - begun) / 1e9)
        costs.append((_ask(server) - before) / (nbytes / 1e9))
    for end, process in zip(ends, processes, strict=True):
        end.send_bytes(b"")
        process.join()
    return {
        "gb_per_s": round(statistics.median(rates[1:]), 3),
        "server_cpu_s_per_gb": round(statistics.median(costs[1:]), 3),
    }


def _ask(server: Any) -> float:
    server.send_bytes(b"?")
    return float(server.recv())


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=64)
    arguments = parser.parse_args()
    found = {name: measure(arguments, tls) for name, tls in (("plain", False), ("tls", True))}
    share = found["tls"]["gb_per_s"] / found["plain"]["gb_per_s"]
    print(json.dumps({**vars(arguments), **found, "tls_over_plain": round(share, 3)}))


if __name__ == "__main__":
    main()
