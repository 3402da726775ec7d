"""Stages that train on records of files: epochs of packed updates, measured on held-out records.

    stage.py       the loop: batch -> pack -> update -> measure -> checkpoint; each kind brings a task
    options.py     what a recipe says of each kind
    order.py       the records of a step, from its number alone
    reading.py     records as units of tokens
    imitation.py   the task of conversations: supervised fine-tuning
    preferences.py the task of pairs: DPO and its kin
    unpaired.py    the task of responses that are desirable or not: KTO
    reward_model.py the task of pairs for a model of scores: a reward model
    distillation.py the task of conversations with a teacher: forward or reverse KL, or JSD, to what it finds likely
    teacher.py     a teacher's likeliest tokens, computed once and kept
    reference.py   logprobs of the model that the stage starts from, computed once and kept

A task turns records into units of sequences and gives the loss of rows of whole units. The invariant: neither packing
nor the number of ranks changes the loss, and a stage that was killed leaves the model that it would have left.
"""
