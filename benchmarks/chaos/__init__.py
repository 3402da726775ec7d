"""`make chaos SEED=0 MINUTES=3`: a whole run whose processes, network, disk and memory keep failing, then an audit.

    faults ──kill -9, SIGSTOP──► learner, its revived predecessors, workers
       │    ──cut, stall, delay─► a link of its own between each of them and the server
       └──kill -9, power loss, full memory, damaged payloads──► server
                                                                  │
    trail of every learner ──lineage of the last checkpoint──► audit: lost, trained twice, over the bound, corrupt

Everything is the product, down to its recipe, but four doubles that are cheap and whose output can be computed again:
the model (`backend`), the inference engine (`engine`), the reward and the prompts (`tasks`). Faults last `minutes`;
then the run is left to finish its prompts, so that what is lost can be counted exactly.

The audit follows the last checkpoint back through the checkpoints that its learners resumed from. Only steps of
this lineage were trained; what a crash threw away was not. `--without NAME` takes one protection out of the product
(`protections`), to show that it is needed and that the audit can fail; only the faults strike that it is there against.
`--against NAME` strikes likewise and takes nothing out. Such trials keep no experience log, nor does every second pair
of seeds; odd seeds have the server sync every write.
"""
