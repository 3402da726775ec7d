"""Tools: how a model is told of them, what becomes of its calls, and the turns in which it makes them.

    ToolTurns ── answer ──► model ── calls ──► Toolbox ──► OpenTool ── typed_functions.py  a Python function with types
    (`toolbox.py`)            ▲                   │                 ├─ text_tools.py       a function of texts
                              └── what it reads ──┘                 └─ kinds/mcp.py        a tool of a server
    threads.py   an episode's thread, for plain functions that may hang

The invariant: whatever becomes of a call, the model reads it, and it is counted. Calls of an answer that was cut
are not carried out.
"""
