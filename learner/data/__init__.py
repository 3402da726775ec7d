"""Prompts for the workers, and the examples, preferences and labelled completions of the learner's other stages.

    texts/          the one way from what a row says to the tokens that a model gets
    prompts/        prompt sources, the cursor over them, and their rendering
    records/        conversations, pairs and labelled completions, read from the layouts that people have
    sources.py      the records that a recipe's stage asks for
    examples.py     {query, response} without end; from a user's function: own_examples.py
                    worked_solutions.py: reasoning-gym entries with their work written down
    mathematics.py  GSM8K and MATH as prompts
    arrow_rows.py   rows of tables, as they were before Arrow gave them one type
    bounded_files.py  which files are read at all: none that is packed, or that memory does not hold
    inspection.py   one file, as each stage would read it

The invariant: the same file, options and seed give the same items in the same order, so a resumed run goes on where it
was.
"""
