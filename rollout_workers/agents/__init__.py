"""Agents play episodes: any program that talks to a model, and the tokens that it made the model sample.

    agent (a host process, or a program of its own)            worker
      rollout(episode, task) ── chat(messages, tools) ──► endpoint/ ──► session ──► formats/ ──► engine
      ▲        kinds/: tools, environments, adapters         dialects    the tree of turns
      └──────────────── answer ◄─────────────────────────────┘           └─ each turn is a durable segment

    conversation.py  messages, tools and tool calls; `ChatFormat`, the seam between them and tokens
    calls.py         a call of the model and its answer; `Session`, what an endpoint speaks to
    episode.py       what agent code sees: `Task`, `Episode`, `Answer`

The invariant: a token is trained only where the engine sampled it, after exactly the tokens that it was sampled after.
What an agent sends is never tokenized again where its tokens are known.
"""
