"""The one way from what a row says to the tokens that a model gets, in all stages and commands.

    content of a row ─ messages ─► text, or messages of one dialect ─ template ─► text ─ tokens ─► token ids

    messages.py  messages of any dialect become those of chat templates; the error of a row
    template.py  the model's chat template makes a text of messages, before a deadline
    tokens.py    texts become tokens that are right at their borders

The invariant: the same content gives the same tokens, whether it is a prompt of reinforcement learning, of an
evaluation or of `headway generate`, or the beginning of a record.
"""
