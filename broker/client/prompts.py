"""The learner feeds prompts; they wait in the pool, in the order of their group ids, until a lease admits
them."""

from collections.abc import Sequence

from headway.broker.connection.connection import Connection
from headway.broker.owner import Owner
from headway.broker.schema import Prompt
from headway.broker.wire.codec import encode

_UNREGISTERED_TTL_S = 600


class PromptVerbs:
    """The verbs by which a learner feeds prompts into the run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def feed(self, prompts: Sequence[Prompt], owner: Owner) -> int:
        """Registers the groups that the run does not know yet, and returns their number. Idempotent.

        The learner feeds again from the checkpoint's cursor after a claim and after a re-assertion: groups that are
        held, trained or dropped are left alone. Groups are begun in the order of their ids.
        """
        if not prompts:
            return 0
        keys = self._connection.keys
        # NX: the blob of a group that is already registered must not get a TTL.
        blobs = [("SET", keys.prompt(p.group), encode(p), "NX", "EX", _UNREGISTERED_TTL_S) for p in prompts]
        groups = [argument for p in prompts for argument in (p.group, p.num_samples, len(p.token_ids))]
        new, *missing = await self._connection.learner_script("feed", owner, *groups, before=blobs)
        if not missing:
            return int(new)
        names = {group.decode() for group in missing}  # an abandoned blob's TTL ended in between
        return int(new) + await self.feed([p for p in prompts if p.group in names], owner)

    async def close_feed(self, owner: Owner) -> None:
        """Says that no more prompts will come, so that the last, short batch can be taken. A claim opens the feed
        again."""
        await self._connection.learner_script("close_feed", owner)

    async def waiting(self) -> tuple[int, bool]:
        """Returns the number of groups fed and not yet admitted, and whether prompts were damaged and must be fed
        again."""
        keys = self._connection.keys
        ahead, has_lost = await self._connection.pipeline(
            [("ZCARD", keys.hidden("pool")), ("EXISTS", keys.hidden("lost"))]
        )
        return int(ahead), bool(has_lost)
