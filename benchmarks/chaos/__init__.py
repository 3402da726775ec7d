"""`make chaos SEED=0 MINUTES=3`: a whole run whose processes, network, disk and memory keep failing, then an audit.

    faults ──kill -9, SIGSTOP──► learner, its revived predecessors, workers, leftovers of an overwritten run
       │    ──cut, stall, delay─► a link of its own between each of them and the server
       │    ──idle connections──► server, and whatever else listens
       │    ──no room on disk───► learner, server
       │    ──hang, exit, raise─► the reward
       │    ──kill -9, junk─────► scorers of a reward model
       └──kill -9, power loss, full memory, damaged payloads──► server ◄──pills, hoarded leases── hostile workers
                                                                  │
    trail of every learner ──lineage of the last checkpoint──► audit: lost, trained twice, over the bound, corrupt,
                                                               off the lineage, off the identity, poisoned

Everything is the product, down to its recipe, but five doubles that are cheap and whose output can be computed again:
the model (`backend`), the inference engine (`engine`), the reward, the reward model (`scorer`) and the prompts
(`tasks`). Workers evaluate beside training. Faults last `minutes`; then the run finishes its prompts undisturbed, so
that lost samples can be counted exactly.

With `--agents hosted` or `--agents outside` the samples are episodes of many turns, whose agents call a tool that has
effects. They run in workers' host processes, or are programs of their own that ask gateways for tasks; these processes
are killed too, and the tool's sandboxes, where pydantic-monty is installed. Agents note answers and effects in a
journal before they use them. The audit compares it with the trained turns: one attempt must have been answered exactly
these turns, and the tool have been called once for each call in them, with the answer that the next turn has read.
Their engine's double samples what can be computed again, but for a random nonce in each answer.

The audit follows the last checkpoint back through the checkpoints that its learners resumed from. Only steps of this
lineage were trained; steps that a crash threw away were not. `--without NAME` takes one protection out of the product
(`protections`), to show that it is needed and that the audit can fail; only the faults that it protects against strike.
`--against NAME` strikes likewise and takes nothing out. Such trials keep no experience log, nor does every second pair
of seeds; odd seeds have the server sync every write; in half of the seeds workers take part in broadcasts instead of
pulling. Full disks are small file systems that the benchmark mounts, which needs root; elsewhere only the learner is
kept from writing. The JSON has memory, descriptors and threads of learner, server, scorers and workers by sixths of the
trial.
"""
