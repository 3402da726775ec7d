"""Groups travel as the broker's own frames; every rank and reader that decodes one checks it again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headway.broker.schema import Group, Prompt
from headway.broker.wire.codec import decode, decode_trajectory, encode, encode_trajectory

if TYPE_CHECKING:  # what shows logged samples needs no torch
    from headway.learner.ranks import Ranks


class GroupFrames(msgspec.Struct, frozen=True, array_like=True):
    """A group as it travels between ranks and lies in the experience log."""

    prompt: bytes
    round: int
    trajectories: tuple[bytes, ...]

    @classmethod
    def of(cls, group: Group) -> "GroupFrames":
        return cls(encode(group.prompt), group.round, tuple(encode_trajectory(t) for t in group.trajectories))

    def check_schema(self) -> None:
        """Raises FrameError where another version of Headway wrote the group; all its frames are of one version."""
        for frame in self.trajectories[:1]:
            decode_trajectory(frame)
        decode(self.prompt, Prompt)

    def group(self) -> Group:
        """Decodes the group. Raises FrameError for a damaged frame."""
        trajectories = tuple(decode_trajectory(frame) for frame in self.trajectories)
        return Group(prompt=decode(self.prompt, Prompt), round=self.round, trajectories=trajectories)


def share_groups(ranks: "Ranks", groups: Sequence[Group] | None) -> list[Group]:
    """Returns rank 0's groups on every rank; None arrives as an empty list. Collective."""
    if ranks.world_size == 1:
        return list(groups or ())
    frames = [GroupFrames.of(group) for group in groups or ()]
    received = ranks.share_bytes(msgspec.msgpack.encode(frames))
    return [frames.group() for frames in msgspec.msgpack.decode(received, type=list[GroupFrames])]
