"""Stages that train on records of files: epochs of packed updates, measured on held-out records.

    stage.py            the loop: batch -> pack -> update -> measure -> checkpoint; each kind brings a task
    sft.py              the task of conversations: supervised fine-tuning
    dpo.py              the task of pairs: DPO and its kin
    kto.py              the task of responses that are desirable or not: KTO
    reward_model.py     the task of pairs for a model of scores: a reward model
    distillation.py     the task of conversations with a teacher: forward or reverse KL, or JSD, to what it finds likely
    response_values.py  reference logprobs and a teacher's likeliest tokens, computed once and kept

`learner/stages/registry.py` has their options. A task turns records into units of sequences and gives the loss of rows
of whole units. The invariant: neither packing nor the number of ranks changes the loss, and a stage that was killed
leaves the model that it would have left.
"""
