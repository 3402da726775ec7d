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
    tool_turns.py    the loop that they share: answer, tool calls, answer

The invariant: what a task says depends on the prompt, its seed and the model's answers alone. So an interrupted episode
is played again from its recorded turns (`resume = "replay"`).
"""
