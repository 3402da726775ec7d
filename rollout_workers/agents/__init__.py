"""Agents play episodes: any program that talks to a model, and the tokens that it made the model sample.

    agent (in a host process, or a program of its own)            worker
      rollout(episode, task) ── chat(messages, tools) ──► endpoint/ ──► session.py ──► formats/ ──► engine
      ▲        kinds/, tasks/, tools/                                    │ turns, a tree (tree.py)
      └──────────────── answer ◄─────────────────────────────────────────┘ each is a durable segment

    episode.py       what agent code sees: `AgentTask`, `AgentEpisode`, `AgentAnswer`; `Agent`, the seam of kinds
    conversation.py  messages, tools and tool calls; `ChatFormat`, the seam between them and tokens
    digests.py       names conversations, each by the one before it
    calls.py         a call of the model and its answer; `Session`, what an endpoint speaks to
    answers.py       turns as their agents get them
    session.py       answers the calls of one episode: from the record, by the engine, or with a refusal
    budget.py        how long an answer may be
    tree.py          records an episode's turns
    player.py        plays samples by agents, scores them, and serves their endpoint
    tally.py         what became of episodes: measures of each one, and sums for the worker's report
    hosted.py        agents in processes of the worker; client.py: their way to the endpoint
    external.py      agents that no worker starts: they claim a task and end it
    endpoint/        HTTP, in the dialects of OpenAI, Anthropic, vLLM and our own
    formats/         conversations as tokens, and answers as messages
    kinds/           the agents that a recipe names: tools, environments and adapters
    tasks/           the tasks that ship
    tools/           what becomes of a model's tool calls
    sandbox/         confines code that a model wrote

The invariant: a token is trained only where the engine sampled it, after exactly the tokens that it was sampled after,
and where the agent saw it. A conversation goes on with the tokens that were sampled; where no exact continuation of
them exists, it is a branch, and counted. A turn is durable before its answer is told, so that a lost worker, agent or
gateway costs an episode the turns that ran, and no other.
"""
