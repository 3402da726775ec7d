"""The inbox gives an engine the newest version next, and frees the memory of versions that it replaces."""

from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe, WeightManifest
from headway.weightsync.deliveries import BufferPool, BufferSet, Delivery
from headway.weightsync.subscriber import Inbox

V1, V2, V3 = (WeightVersion(1, step) for step in (1, 2, 3))


class NotedLanding(BufferPool):
    def __init__(self) -> None:
        self.given_back: list[BufferSet] = []

    def give_back(self, landed: BufferSet) -> None:
        self.given_back.append(landed)


def delivery(version: WeightVersion, *, may_be_reused: bool = True) -> Delivery:
    probe = Probe(token_ids=[], logprobs=[], tolerance=0.0)
    manifest = WeightManifest(
        version=version, tensors=(), buckets=(), probe=probe, group_epoch=0, pull_url="", pull_token=""
    )
    return Delivery(manifest, BufferSet(()), may_be_reused)


def test_a_newer_version_replaces_what_waits_and_an_older_one_is_refused() -> None:
    landing = NotedLanding()
    inbox, one, two = Inbox(landing), delivery(V1), delivery(V2)
    inbox.hold(None)
    assert inbox.put(one)
    assert inbox.put(two)
    assert landing.given_back == [one.landed]
    assert not inbox.put(delivery(V1))
    assert inbox.take() is two
    assert inbox.take() is None
    assert not inbox.is_newer(V2)


def test_what_the_engine_holds_is_kept_for_it_until_the_memory_is_needed() -> None:
    landing = NotedLanding()
    inbox, one, two = Inbox(landing), delivery(V1), delivery(V2)
    for each in (one, two):
        inbox.put(each)
        assert inbox.take() is each
        inbox.hold(each.manifest.version)
    assert landing.given_back == [one.landed]
    inbox.hold(None)  # the engine has lost its weights
    assert inbox.take_kept(V1) is None
    assert inbox.take_kept(V2) is two
    assert inbox.put(two)
    assert inbox.take() is two
    inbox.hold(V2)
    inbox.drop_kept()
    assert landing.given_back == [one.landed, two.landed]
    assert inbox.take_kept(V2) is None


def test_a_version_whose_swap_failed_is_not_kept_and_may_come_again() -> None:
    landing = NotedLanding()
    inbox, one, two = Inbox(landing), delivery(V1), delivery(V2)
    inbox.put(one)
    inbox.take()
    inbox.hold(V1)
    inbox.put(two)
    inbox.take()
    inbox.hold(V1)
    assert landing.given_back == [two.landed]
    assert inbox.put(delivery(V2))


def test_what_has_come_since_is_taken_in_place_of_what_was_not_touched() -> None:
    landing = NotedLanding()
    inbox, one, three = Inbox(landing), delivery(V1), delivery(V3)
    inbox.put(one)
    assert inbox.take() is one
    assert inbox.take_instead() is None
    inbox.put(three)
    assert inbox.take_instead() is three
    assert landing.given_back == [one.landed]


def test_memory_that_somebody_else_keeps_is_not_given_back() -> None:
    landing = NotedLanding()
    inbox = Inbox(landing)
    inbox.put(delivery(V1, may_be_reused=False))
    inbox.put(delivery(V2, may_be_reused=False))
    inbox.take()
    inbox.hold(V2)
    inbox.hold(V2)
    assert inbox.take_kept(V2) is None
    assert landing.given_back == []
