"""Prompts for the workers, and the examples, preferences and labelled completions of the learner's other stages.

    messages.py       messages of any dialect become those of chat templates; the error of a row
    tokenization.py   messages ─ chat template ─► text ─► the tokens that a model gets
    prompts/          prompt sources, the cursor over them, and their rendering
    records/          conversations, pairs and labelled completions, read from the layouts that people have
    examples.py       {query, response} examples without end: worked chains and tasks, files, a user's function
    math_datasets.py  GSM8K and MATH as prompts
    file_reading.py   reads lines and tables, and refuses packed files and those that memory does not hold
    inspection.py     reads one file as each stage would

The invariant: the same file, options and seed give the same items in the same order, so a resumed run goes on where it
was.
"""
