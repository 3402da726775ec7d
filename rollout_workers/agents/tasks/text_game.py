"""A small text adventure: find the note and the chest among the rooms, and open the chest with what the note said.

A room is described only while the player is in it, and the note crumbles once it is read: map and number have to be
remembered. The chest takes one number; a wrong one locks it for good.
"""

import random
import re
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome

DIRECTIONS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
ROOMS = ("hall", "kitchen", "cellar", "library", "attic", "garden", "stable", "chapel", "study", "workshop", "pantry",
         "gallery", "tower", "crypt", "orchard", "armoury")  # fmt: skip
RULES = (
    "You are in a house. Answer each time with one command on its last line: `go north` (south, east, west), `read"
    " note`, or `open chest NUMBER`. Find the note, remember its number, and open the chest with it. You may try one"
    " number."
)
_GO = re.compile(r"go (north|south|east|west)")
_OPEN = re.compile(r"open chest (\d{1,9})")
Place = tuple[int, int]


class TextGameOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the house, and how long the player may take."""

    rooms: Annotated[int, Meta(ge=3, le=len(ROOMS))] = 6
    max_turns: Annotated[int, Meta(ge=1, le=1000)] = 30
    """The most commands."""
    found_note_reward: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """The reward of an episode that read the note and did not open the chest."""


class TextGame(Agent):
    """Reward 1 for the open chest, else 0, or `found_note_reward` where the note was read."""

    def __init__(self, options: TextGameOptions, roots: ImportRoots, where: str) -> None:
        self._options = options

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        house = House.drawn(random.Random(f"text_game:{task.seed}"), self._options.rooms)
        messages: list[Message] = [{"role": "user", "content": f"{RULES}\n\n{house.described()}"}]
        turns = 0
        while turns < self._options.max_turns and not house.is_over:
            answer = await episode.chat(messages)
            if answer.is_over:
                break
            turns += 1
            messages += [answer.message, {"role": "user", "content": house.obey(answer.content)}]
        credit = self._options.found_note_reward if house.note_is_read else 0.0
        reward = 1.0 if house.chest_is_open else credit
        return {"reward": reward, "rooms_seen": float(len(house.seen))}


@dataclass(kw_only=True)
class House:
    """Rooms on a grid, and what has happened in them."""

    rooms: dict[Place, str]
    """The name of each room by its place; rooms side by side are connected."""
    note: Place
    chest: Place
    number: int
    """What opens the chest."""
    here: Place = (0, 0)
    note_is_read: bool = False
    chest_is_open: bool = False
    chest_is_locked: bool = False
    """Whether a wrong number has locked it for good."""
    seen: set[Place] = field(default_factory=lambda: {(0, 0)})

    @classmethod
    def drawn(cls, rng: random.Random, rooms: int) -> "House":
        """Draw a house. The player begins in neither the room of the note nor that of the chest, which differ."""
        places = [(0, 0)]
        while len(places) < rooms:
            east, north = rng.choice(places)
            step_east, step_north = rng.choice(list(DIRECTIONS.values()))
            if (place := (east + step_east, north + step_north)) not in places:
                places.append(place)
        note, chest = rng.sample(places[1:], 2)
        names = dict(zip(places, rng.sample(ROOMS, rooms), strict=True))
        return cls(rooms=names, note=note, chest=chest, number=rng.randint(100, 999))

    @property
    def is_over(self) -> bool:
        """Whether no command can change the outcome any more."""
        return self.chest_is_open or self.chest_is_locked

    def described(self) -> str:
        """Return what the player sees."""
        exits = [name for name in DIRECTIONS if self._beyond(name) in self.rooms]
        things = [" A note lies here."] if self.here == self.note and not self.note_is_read else []
        things += [" A chest with a lock of three digits stands here."] if self.here == self.chest else []
        return f"You are in the {self.rooms[self.here]}. Exits: {', '.join(exits)}.{''.join(things)}"

    def obey(self, text: str) -> str:
        """Carry out the command on the last line of `text`, and return what happens."""
        lines = text.strip().lower().splitlines()
        command = lines[-1].strip(" .`>*") if lines else ""
        if went := _GO.fullmatch(command):
            return self._go(went[1])
        if command == "read note" and self.here == self.note and not self.note_is_read:
            self.note_is_read = True
            return f"The note says {self.number}. It crumbles to dust."
        opened = _OPEN.fullmatch(command)
        if opened and self.here == self.chest:
            return self._open(int(opened[1]))
        return f"You cannot do that. {self.described()}"

    def _go(self, direction: str) -> str:
        if (place := self._beyond(direction)) not in self.rooms:
            return f"There is no way {direction}. {self.described()}"
        self.here = place
        self.seen.add(place)
        return self.described()

    def _open(self, number: int) -> str:
        if number != self.number:
            self.chest_is_locked = True
            return "The lock jams for good."
        self.chest_is_open = True
        return "The chest opens. You have won."

    def _beyond(self, direction: str) -> Place:
        step_east, step_north = DIRECTIONS[direction]
        return self.here[0] + step_east, self.here[1] + step_north
