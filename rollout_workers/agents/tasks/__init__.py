"""Tasks that ship: agents with their own tools or worlds, which judge their episodes themselves.

    prompt ── seed, ground truth ──► task ── chat ──► model
                                      ▲  └─ tool answers, what the world says ─┘
                                      └─ the end state decides the reward, from 0 to 1

    calculator.py    chains of operations, each worked out by a tool
    guess_number.py  a hidden number, found by `higher` and `lower`
    text_game.py     rooms to explore, a note to remember, a chest to open
    retail.py        a desk of a shop: orders, six tools, a customer with wishes
    retrieval.py     questions that passages of a local file answer
    python_math.py   tasks of reasoning-gym with a Python interpreter

The invariant: what a task says depends on the prompt, its seed and the model's answers alone. So an interrupted episode
is played again from its recorded turns (`resume = "replay"`).
"""

from typing import Any

import msgspec

TASKS = ("calculator", "guess_number", "python_math", "retail", "retrieval", "text_game")


def task_parts(kind: str) -> tuple[type[msgspec.Struct], Any]:
    """Return the options of a task and its class, of whose kind there is one in TASKS."""
    match kind:
        case "calculator":
            from .calculator import Calculator, CalculatorOptions

            return CalculatorOptions, Calculator
        case "guess_number":
            from .guess_number import GuessNumber, GuessNumberOptions

            return GuessNumberOptions, GuessNumber
        case "python_math":
            from .python_math import PythonMath, PythonMathOptions

            return PythonMathOptions, PythonMath
        case "retail":
            from .retail import Retail, RetailOptions

            return RetailOptions, Retail
        case "retrieval":
            from .retrieval import Retrieval, RetrievalOptions

            return RetrievalOptions, Retrieval
        case "text_game":
            from .text_game import TextGame, TextGameOptions

            return TextGameOptions, TextGame
    raise AssertionError(f"no task {kind}")
