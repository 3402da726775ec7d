"""A desk of a small shop: a customer states wishes, and the model grants those that the rules allow by its tools.

The customer follows a script: a greeting with the first wish, then the e-mail address, then one wish after the other,
each after an answer of the model. A wish names the item, not the order's number. Some wishes the rules forbid.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import begin
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.tools.toolbox import Toolbox, ToolTurns

from .retail_desk import COLOURS, ORDERS_EACH, REASONS, Desk, draw_address

RULES = (
    "You serve the desk of a shop. Ask for the customer's e-mail address before anything else. A pending order can be"
    " cancelled, or sent to another address. A delivered order can be returned, or exchanged for another colour."
    " Do what the customer asks and these rules allow, and nothing else; say so where they forbid it."
)


class RetailOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The customer's wishes, and how long the desk may take."""

    wishes: Annotated[int, Meta(ge=1, le=ORDERS_EACH)] = 2
    """The number of wishes, each about another order. The rules allow the first one drawn; others by chance."""
    max_turns: Annotated[int, Meta(ge=1, le=1000)] = 20
    """The most answers of the model."""


@dataclass(frozen=True)
class Wish:
    """What a customer wants."""

    text: str
    grant: Callable[[Desk], str] | None
    """Does it; None: the rules forbid it."""


class Retail(Agent):
    """Reward 1 if the database ends exactly as the wishes and the rules want it, else 0."""

    def __init__(self, options: RetailOptions, roots: ImportRoots, where: str) -> None:
        self._options = options

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        rng = random.Random(f"retail:{task.seed}")
        desk = Desk.drawn(rng)
        email = rng.choice(sorted(desk.customers))
        wishes = draw_wishes(rng, desk, email, self._options.wishes)
        wanted = copy.deepcopy(desk)
        for wish in wishes:
            if wish.grant:
                wish.grant(wanted)
        toolbox = Toolbox(desk.tools)
        turns = ToolTurns(episode, begin([], RULES), toolbox, self._options.max_turns)
        for line in script(desk.customers[email]["name"], email, wishes):
            turns.messages.append({"role": "user", "content": line})
            if await turns.answer() is None or turns.is_over:
                break
        return {"reward": float(desk == wanted), **toolbox.measures}


def script(name: str, email: str, wishes: list[Wish]) -> list[str]:
    """Return what the customer says, in order."""
    first, *others = wishes
    return [
        f"Hello, this is {name}. {first.text}",
        f"My e-mail address is {email}.",
        *(f"One more thing: {wish.text}" for wish in others),
    ]


def draw_wishes(rng: random.Random, desk: Desk, email: str, count: int) -> list[Wish]:
    """Draw wishes about different orders of a customer, at least one of which the rules allow, in random order."""
    mine: list[str] = list(desk.customers[email]["orders"])
    allowed = rng.choice([number for number in mine if desk.orders[number]["status"] != "shipped"])
    others = rng.sample([number for number in mine if number != allowed], count - 1)
    drawn = [_wish(rng, desk, allowed, desk.orders[allowed]["status"])]
    drawn += [_wish(rng, desk, number, rng.choice(("pending", "delivered"))) for number in others]
    rng.shuffle(drawn)
    return drawn


def _wish(rng: random.Random, desk: Desk, number: str, believed: str) -> Wish:
    """Draw a wish about an order that the customer believes to be pending or delivered."""
    order = desk.orders[number]
    item, kind = order["item"], rng.choice(_WISHES[believed])
    text, grant = kind(rng, number, item, order["colour"])
    return Wish(text, grant if believed == order["status"] else None)


Drawn = tuple[str, Callable[[Desk], str]]


def _cancelled(rng: random.Random, number: str, item: str, colour: str) -> Drawn:
    reason = rng.choice(REASONS)
    said = {"no longer needed": "I no longer need it", "ordered by mistake": "I ordered it by mistake"}[reason]
    return f"Please cancel my order of the {item}: {said}.", lambda desk: desk.cancel_order(number, reason)


def _sent_elsewhere(rng: random.Random, number: str, item: str, colour: str) -> Drawn:
    address = draw_address(rng)
    return f"Please send the {item} to {address} instead.", lambda desk: desk.change_address(number, address)


def _returned(rng: random.Random, number: str, item: str, colour: str) -> Drawn:
    return f"I want to return the {item}.", lambda desk: desk.return_order(number)


def _exchanged(rng: random.Random, number: str, item: str, colour: str) -> Drawn:
    other = rng.choice([one for one in COLOURS if one != colour])
    return f"I want to exchange the {item} for a {other} one.", lambda desk: desk.exchange_order(number, other)


_WISHES = {"pending": (_cancelled, _sent_elsewhere), "delivered": (_returned, _exchanged)}
