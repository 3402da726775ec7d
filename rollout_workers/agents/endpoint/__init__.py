"""The HTTP endpoint by which agents talk to the model, in the dialects that their clients speak.

    client ──POST /s/SESSION/v1/...──► server ──► dialect.read ──► ChatCall ──► Session.chat
                                       │                                          │
           ◄── JSON or events ── connections ◄── dialect.answer ◄── ChatAnswer ◄──┘

    server.py             `Endpoint`: routes, sessions by path or by API key, one outcome for each request
    connections.py        connections, bodies, answers: bounded in number, size and time
    known_parts.py        messages and tools that a request repeats, which are not read again
    admission.py          the calls that sessions are answering: bounded in number, for each session too
    problems.py           what can go wrong, as HTTP status and kind; refused_calls.py counts it
    dialect.py, fields.py the seam of the dialects; which fields of a request are read, harmless or refused
    openai_chat.py, anthropic_messages.py, openai_responses.py, vllm_generate.py, native.py   the dialects

The invariant: an answer is lost until the kernel has all of it for the client, and the session learns of each answer
that is lost, so that the client's retry gets it. A client that leaves cancels its call; what the session has begun to
sample for it is the session's to finish.
"""
