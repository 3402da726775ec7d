"""One look at every key of a run, as the table in `broker/keys.py` describes them, and the invariants among them."""

import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import redis

from headway.broker.keys import Keys

_LOOK = """
local seen = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local kind, value = redis.call('TYPE', key).ok, 0
  if kind == 'hash' then value = redis.call('HGETALL', key)
  elseif kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'list' then value = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'set' then value = redis.call('SMEMBERS', key)
  elseif kind == 'string' then value = redis.call('STRLEN', key) end
  seen[#seen + 1] = { key, value, redis.call('PTTL', key) }
end
return cjson.encode(seen)
"""
_WITHOUT_OWNER = {
    "meta",
    "identity",
    "owner",
    "strikes",
    "quarantined",
    "refused",
    "standing",
    "secret",
    "bell",
    "verbs",
    "tally",
    "config",
    "settled",
    "dropped",
    "given_up",
    "lost",
    "forks",
    "garbage",
    "dead",
    "evaluations",
    "model",
    "steps",
}
_QUEUES = {"pool", "retry", "leases", "open", "ready", "pinned"}
_SIGNED = {"incarnation", "announced_step", "offered_step"}


@dataclass(frozen=True)
class GroupState:
    """The hash of a group."""

    fields: dict[str, str]

    @property
    def state(self) -> str:
        return self.fields["state"]

    @property
    def size(self) -> int:
        return int(self.fields["size"])

    @property
    def round(self) -> int:
        return int(self.fields["round"])

    @property
    def is_trimmed(self) -> bool:
        return self.fields.get("trimmed") == "1"

    def number(self, name: str) -> int | None:
        return int(self.fields[name]) if name in self.fields else None

    def of_samples(self, name: str) -> dict[int, str]:
        """Return the values of this field by sample: token, step, oldest or payload."""
        found = {i: self.fields.get(f"{name}:{i}") for i in range(self.size)}
        return {i: value for i, value in found.items() if value is not None}

    def number_by_step(self) -> dict[int, tuple[int, int]]:
        """The samples and tokens of each step, as a ready group has them."""
        said = [[int(number) for number in one.split(":")] for one in self.fields["by_step"].split()]
        return {step: (samples, tokens) for step, samples, tokens in said}

    def counted_by_step(self) -> dict[int, tuple[int, int]]:
        """The same from what is known of each sample."""
        samples, tokens = Counter[int](), Counter[int]()
        for said in self.of_samples("tokens").values():
            versions = list(struct.iter_unpack(">3I", said.encode("latin-1")))
            samples[min(step for _, step, _ in versions)] += 1
            for _, step, count in versions:
                tokens[step] += count
        return {step: (samples[step], count) for step, count in tokens.items()}


@dataclass(frozen=True)
class EvaluationState:
    """The two keys of an evaluation."""

    fields: dict[str, str]
    left: dict[str, float]
    """The samples that are not done, with their deadlines."""

    @property
    def prompts(self) -> int:
        return int(self.fields["size"]) // int(self.fields["samples"])

    def check(self) -> None:
        size = int(self.fields["size"])
        done = {str(i) for i in range(size) if f"result:{i}" in self.fields}
        assert int(self.fields["done"]) == len(done), self.fields
        assert not done & set(self.left), f"done, and to be done: {self}"
        assert done | set(self.left) == {str(i) for i in range(size)}, f"lost: {self}"
        tokens = {name.removeprefix("token:") for name in self.fields if name.startswith("token:")}
        assert done <= tokens <= done | {i for i, deadline in self.left.items() if deadline}, f"tokens: {self}"


@dataclass(frozen=True)
class Audit:
    """A run on the server at one moment."""

    meta: dict[str, str]
    groups: dict[str, GroupState]
    queues: dict[str, dict[str, float]]
    batches: dict[int, list[str]]
    segments: dict[str, list[tuple[str, int, int]]]
    """The name, the bytes and the tokens of each segment, by member."""
    blobs: dict[str, int]
    """The bytes of prompts, payloads and segments that will stay."""
    settled: set[str]
    dropped: set[str]
    lost: set[str]
    garbage: set[str]
    forks: dict[str, str]
    evaluations: dict[str, EvaluationState] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    """Keys that are not in the table, or have no owner."""

    @property
    def announced_step(self) -> int | None:
        return int(self.meta["announced_step"]) if "announced_step" in self.meta else None

    @property
    def watermark(self) -> str:
        return self.meta.get("watermark", "")

    def count(self, name: str) -> int:
        return int(self.meta.get(name, 0))

    def is_done(self, group: str) -> bool:
        """Whether the group will never be generated again."""
        return group in self.settled | self.dropped or (group not in self.groups and group < self.watermark)

    def check(self) -> None:
        """Raises AssertionError where the keys contradict each other."""
        assert not self.unknown, f"not in the table, or without an owner: {self.unknown}"
        negative = {name: value for name, value in self.meta.items() if value.startswith("-") and name not in _SIGNED}
        assert not negative, f"negative: {negative}"
        for name, group in self.groups.items():
            self._check_group(name, group)
        self._check_queues()
        self._check_blobs()
        for evaluation in self.evaluations.values():
            evaluation.check()

    def _check_group(self, name: str, group: GroupState) -> None:
        fields = f"{name}: {group.fields}"
        assert name not in self.settled | self.dropped, f"settled and held: {fields}"
        pins = [step for step, batch in self.batches.items() if name in batch]
        places = {
            "pool": name in self.queues["pool"],
            "ready": name in self.queues["ready"],
            "pinned": bool(pins),
            "lost": name in self.lost and group.state == "lost",
        }
        assert [place for place, is_there in places.items() if is_there] == [group.state] * (group.state != "open"), (
            f"in {places}: {fields}"
        )
        assert pins == ([group.number("pin")] if group.state == "pinned" else []), f"pinned to {pins}: {fields}"
        payloads, steps = group.of_samples("payload"), [int(step) for step in group.of_samples("step").values()]
        assert (group.number("done") or 0) == len(payloads), fields
        assert group.number("floor") == min(steps, default=None), fields
        assert (name in self.queues["open"]) == (group.state == "open" and bool(steps)), f"begun, or not: {fields}"
        for queue in ("open", "ready"):
            assert self.queues[queue].get(name, group.number("floor")) == group.number("floor"), f"{queue}: {fields}"
        if group.state == "ready":
            assert len(payloads) == group.size or group.is_trimmed, f"ready without {fields}"
            assert group.number_by_step() == group.counted_by_step(), f"miscounted: {fields}"
        self._check_samples(name, group, payloads)

    def _check_samples(self, name: str, group: GroupState, payloads: dict[int, str]) -> None:
        for i in range(group.size):
            member = f"{name}:{group.round}:{i}"
            where = [queue for queue in ("retry", "leases") if member in self.queues[queue]]
            where += ["payload"] * (i in payloads)
            if group.state == "open":
                assert len(where) == 1, f"{member} is in {where}"
                if "retry" in where:
                    assert self.queues["retry"][member] == group.number("index"), f"{member} has another index"
            else:
                assert where == ["payload"] * (i in payloads), (
                    f"{member} of a group that is {group.state} is in {where}"
                )
            has_segments = f"oldest:{i}" in group.fields
            assert has_segments == (member in self.segments), f"{member}: segments {has_segments}"
            assert not has_segments or (group.state == "open" and i not in payloads), f"{member}: useless segments"

    def _check_queues(self) -> None:
        members = {f"{name}:{group.round}:{i}" for name, group in self.groups.items() for i in range(group.size)}
        for queue, allowed in (("retry", members), ("leases", members), ("segments", members)):
            held = self.segments if queue == "segments" else self.queues[queue]
            assert set(held) <= allowed, f"{queue}: {set(held) - allowed} of no group's round"
        for queue in ("pool", "open", "ready"):
            assert set(self.queues[queue]) <= set(self.groups), f"{queue}: unknown groups"
        pinned = [name for batch in self.batches.values() for name in batch]
        assert set(pinned) <= set(self.groups), f"unknown groups: {self.batches}"
        assert {str(step) for step in self.batches} <= set(self.queues["pinned"]), f"not pinned: {self.batches}"

    def _check_blobs(self) -> None:
        used: Counter[str] = Counter()
        for name, group in self.groups.items():
            prompt = f"prompt:{name}"
            # A group pinned by a learner to a server that never had it lacks everything.
            assert prompt in self.blobs or group.state in ("pinned", "lost"), f"{name}: no prompt"
            mine = [*group.of_samples("payload").values()]
            mine += [s for i in range(group.size) for s, *_ in self.segments.get(f"{name}:{group.round}:{i}", ())]
            assert set(mine) <= set(self.blobs), f"{name}: lacks {set(mine) - set(self.blobs)}"
            size = sum(self.blobs[blob] for blob in mine)
            assert (group.number("bytes") or 0) == size, f"{name}: {size} bytes, not {group.fields}"
            used.update([prompt, *mine])
        for version, evaluation in self.evaluations.items():
            used.update(f"prompt:evaluation:{version}:{n}" for n in range(evaluation.prompts))
        orphans = set(self.blobs) - set(used) - self.garbage
        assert not orphans, f"without an owner and a time to live: {orphans}"
        stored = sum(size for blob, size in self.blobs.items() if blob in used and not blob.startswith("prompt:"))
        assert self.count("payload_bytes") == stored, f"{stored} bytes stored, payload_bytes {self.meta}"


class Auditor:
    """A client of its own, which reads and changes any key."""

    def __init__(self, url: str, run: str) -> None:
        self.redis: Any = redis.Redis.from_url(url)
        self._run = run
        self._look = self.redis.register_script(_LOOK)

    def wipe(self) -> None:
        """Remove every key of the run."""
        if names := self.names():
            self.redis.unlink(*names)
        self.redis.function_flush()

    def close(self) -> None:
        self.wipe()
        self.redis.close()

    @property
    def keys(self) -> Keys:
        """Return the keys as the learner knows them."""
        keys = Keys(self._run)
        keys.secret = self.redis.get(keys("secret")).decode()
        return keys

    def blob(self, name: str) -> str:
        """Return the key of a blob, a prompt among them, as an audit names it."""
        kind, _, group = name.partition(":")
        return self.keys.prompt(group) if kind == "prompt" else self.keys.blob(name)

    def names(self) -> list[bytes]:
        return list(self.redis.keys(f"headway:{{{self._run}*"))

    def save(self) -> dict[bytes, tuple[int, bytes]]:
        """Return everything, with the remaining times to live."""
        pipe, names = self.redis.pipeline(), self.names()
        for name in names:
            pipe.pttl(name).dump(name)
        replies = pipe.execute()
        return {
            name: (max(0, ttl), dump)
            for name, ttl, dump in zip(names, replies[::2], replies[1::2], strict=True)
            if dump is not None
        }

    def restore(self, saved: dict[bytes, tuple[int, bytes]]) -> None:
        """Restore everything, as if the server had forgotten all later changes."""
        pipe = self.redis.pipeline(transaction=True)
        for name in self.names():
            pipe.unlink(name)
        for name, (ttl, dump) in saved.items():
            pipe.restore(name, ttl, dump)
        pipe.execute()

    def look(self) -> Audit:
        audit = _Reading(self._run)
        seen = self._look(args=[f"headway:{{{self._run}*"]).decode("latin-1")  # some values are bytes, not text
        for key, value, ttl in json.loads(seen):
            audit.read(key, value, ttl)
        return audit.result()


class _Reading:
    """Sorts keys into an Audit."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._values: dict[str, Any] = {}
        self._groups: dict[str, GroupState] = {}
        self._batches: dict[int, list[str]] = {}
        self._segments: dict[str, list[tuple[str, int, int]]] = {}
        self._blobs: dict[str, int] = {}
        self._evaluations: dict[str, dict[str, Any]] = {}
        self._unknown: list[str] = []

    def read(self, key: str, value: Any, ttl: int) -> None:
        shard, _, name = key.removeprefix("headway:{" + self._run).partition("}:")
        kind, _, rest = name.partition(":")
        if kind == "hidden":
            name = rest.partition(":")[2]
        elif kind == "prompt":
            name = f"prompt:{rest.partition(':')[2]}"
        kind, _, rest = name.partition(":")
        match kind:
            case "group":
                self._groups[rest] = GroupState(dict(_pairs(value)))
            case "batch":
                self._batches[int(rest)] = value
            case "segments":
                self._segments[rest] = [_segment(entry) for entry in value]
            case "prompt" | "payload" | "segment":
                if ttl < 0:
                    self._blobs[f"{shard.strip('/')}/{name}" if shard else name] = int(value)
            case "evaluation" | "evaluating":
                self._evaluations.setdefault(rest, {})[kind] = dict(_pairs(value))
            case "manifest" | "begun":
                pass
            case _ if name in _WITHOUT_OWNER | _QUEUES:
                self._values[name] = value
            case _ if ttl < 0:
                self._unknown.append(key)

    def result(self) -> Audit:
        def flat(name: str) -> list[str]:
            return list(self._values.get(name) or [])

        evaluations = {
            version: EvaluationState(
                keys["evaluation"], {i: float(deadline) for i, deadline in keys.get("evaluating", {}).items()}
            )
            for version, keys in self._evaluations.items()
        }
        assert set(evaluations) == set(flat("evaluations"))
        queues = {name: {m: float(score) for m, score in _pairs(flat(name))} for name in _QUEUES}
        return Audit(
            meta=dict(_pairs(flat("meta"))),
            groups=self._groups,
            queues=queues,
            batches=self._batches,
            segments=self._segments,
            blobs=self._blobs,
            settled=set(flat("settled")[::2]),
            dropped=set(flat("dropped")[::2]),
            lost=set(flat("lost")),
            garbage=set(flat("garbage")),
            forks=dict(_pairs(flat("forks"))),
            evaluations=evaluations,
            unknown=self._unknown,
        )


def _pairs(flat: list[str]) -> Iterator[tuple[str, str]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _segment(entry: str) -> tuple[str, int, int]:
    name, size, tokens, _, by_step = entry.split(" ")
    assert sum(int(one.partition(":")[2]) for one in by_step.split(",") if one) == int(tokens), entry
    return name, int(size), int(tokens)
