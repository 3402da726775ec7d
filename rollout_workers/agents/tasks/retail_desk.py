"""The orders database of a small shop, in memory, with the six tools of its desk."""

import json
import random
from dataclasses import dataclass
from typing import Any

from headway.rollout_workers.agents.tools.text_tools import TextTool
from headway.rollout_workers.agents.tools.toolbox import ToolError

NAMES = ("Ada Berg", "Ben Cole", "Chi Dang", "Dora Eng", "Emil Frey", "Fay Gold", "Gus Hill", "Ida Jung")
STREETS = ("Oak Lane", "Mill Road", "High Street", "Park Row", "Lake View", "Station Road")
ITEMS = ("lamp", "kettle", "rucksack", "tent", "keyboard", "blanket", "teapot", "jacket", "clock", "chair", "mirror",
         "radio", "bicycle pump", "camera", "desk", "umbrella")  # fmt: skip
COLOURS = ("red", "blue", "green", "white", "black")
REASONS = ("no longer needed", "ordered by mistake")
STATUSES = ("pending", "shipped", "delivered")
CUSTOMERS = 5
ORDERS_EACH = 4


@dataclass(frozen=True)
class Desk:
    """The database, and what may be done with it."""

    orders: dict[str, dict[str, Any]]
    """By the order's number: customer (an e-mail address), item, colour, price, address, status, and what was noted."""
    customers: dict[str, dict[str, Any]]
    """By e-mail address: name, address, the numbers of the customer's orders."""

    @classmethod
    def drawn(cls, rng: random.Random) -> "Desk":
        """Draw customers, each with orders of different items, of which at least one is pending and one delivered."""
        orders: dict[str, dict[str, Any]] = {}
        customers: dict[str, dict[str, Any]] = {}
        numbers = iter(rng.sample(range(1000, 10_000), CUSTOMERS * ORDERS_EACH))
        for name in rng.sample(NAMES, CUSTOMERS):
            email, address = f"{name.lower().replace(' ', '.')}@mail.example", draw_address(rng)
            statuses = ["pending", "delivered", *rng.choices(STATUSES, k=ORDERS_EACH - 2)]
            mine = [f"W{next(numbers)}" for _ in statuses]
            for number, item, status in zip(mine, rng.sample(ITEMS, len(mine)), statuses, strict=True):
                about = {"item": item, "colour": rng.choice(COLOURS), "price": rng.randint(5, 200)}
                orders[number] = {"customer": email, **about, "address": address, "status": status}
            customers[email] = {"name": name, "address": address, "orders": sorted(mine)}
        return cls(orders, customers)

    @property
    def tools(self) -> list[TextTool]:
        """What the model may do at the desk."""
        order = {"order": "number of the order, such as W1234"}
        return [
            TextTool(
                self.find_customer,
                "Shows a customer's name, address and orders.",
                {"email": "the customer's e-mail address"},
            ),
            TextTool(self.get_order, "Shows an order.", order),
            TextTool(self.cancel_order, "Cancels a pending order.", {**order, "reason": " or ".join(REASONS)}),
            TextTool(
                self.change_address, "Changes where a pending order is sent.", {**order, "address": "the new address"}
            ),
            TextTool(self.return_order, "Takes a delivered order back.", order),
            TextTool(
                self.exchange_order,
                "Exchanges the item of a delivered order for one of another colour.",
                {**order, "colour": ", ".join(COLOURS)},
            ),
        ]

    def find_customer(self, email: str) -> str:
        """Return the customer as JSON. Raises ToolError, as all tools do."""
        if (found := self.customers.get(email.strip().lower())) is None:
            raise ToolError("there is no customer with this e-mail address")
        return json.dumps(found)

    def get_order(self, order: str) -> str:
        """Return the order as JSON."""
        return json.dumps({"order": order.strip(), **self._order(order)})

    def cancel_order(self, order: str, reason: str) -> str:
        """Cancel a pending order."""
        if reason not in REASONS:
            raise ToolError(f"the reason must be: {' or '.join(REASONS)}")
        self._order(order, "pending").update(status="cancelled", reason=reason)
        return "cancelled"

    def change_address(self, order: str, address: str) -> str:
        """Change the address of a pending order."""
        if not address.strip():
            raise ToolError("the address is empty")
        self._order(order, "pending").update(address=address.strip())
        return "changed"

    def return_order(self, order: str) -> str:
        """Take a delivered order back."""
        self._order(order, "delivered").update(status="returned")
        return "a return label is on its way"

    def exchange_order(self, order: str, colour: str) -> str:
        """Exchange the item of a delivered order."""
        found = self._order(order, "delivered")
        if colour not in COLOURS or colour == found["colour"]:
            raise ToolError(f"the colour must be another one of {', '.join(COLOURS)}")
        found.update(status="exchanged", new_colour=colour)
        return "the exchange is on its way"

    def _order(self, number: str, status: str = "") -> dict[str, Any]:
        if (found := self.orders.get(number.strip())) is None:
            raise ToolError("there is no such order")
        if status and found["status"] != status:
            raise ToolError(f"the order is {found['status']}, and must be {status}")
        return found


def draw_address(rng: random.Random) -> str:
    """Return a street and a number."""
    return f"{rng.randint(1, 99)} {rng.choice(STREETS)}"
