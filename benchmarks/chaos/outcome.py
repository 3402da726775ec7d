"""What is known of a trial when it is over."""

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The benchmark's JSON."""

    seed: int
    minutes: float
    rarely: float
    """So many times rarer than usual were faults."""
    without: str
    against: str
    """The protection whose faults struck more often."""
    tasks: int
    steps: int
    seconds: float
    finished: bool
    """False: it hung, and what it had not trained by then counts as lost."""
    kills: dict[str, int]
    effective_kills: dict[str, int]
    """Those that hit a held lease, a batch not yet committed, or weights on their way."""
    stops: dict[str, int]
    crashes: dict[str, int]
    """Ends with an error that nobody asked for; the logs say which."""
    cuts: int
    power_losses: int
    revived_learners: int
    unfenced_learners: int
    """Of these, those that did not end by themselves."""
    leftovers: int
    """Processes of an overwritten run that were woken."""
    unexpelled_leftovers: int
    """Of these, those that did not leave by themselves."""
    pills: dict[str, int]
    """Sent by hostile workers, by kind."""
    quarantined: int
    """How often a hostile worker got no more leases."""
    junk_requests: dict[str, int]
    """Asked of the reward model by hostile workers, by kind."""
    skipped_evaluations: int
    """Those that gave no result, as no worker kept the version for long enough."""
    hoards: int
    """How often a hostile worker took all leases that it could get, under ever new names."""
    hoarded: int
    """The samples that it took so."""
    rewards_repeated: int
    """Calls of the reward that hung, raised or ended their process, or were in it when another one did."""
    floods: int
    full_disks: int
    broadcasts: bool
    """False: all workers pulled."""
    full_memory: int
    damaged: int
    repeated_submissions: int
    forgotten_renewals: int
    lost: int
    trained_twice: int
    over_lag_bound: int
    corrupt: int
    off_lineage: int
    off_identity: int
    poisoned: int
    tokens_generated: int
    tokens_resumed: int
    tokens_regenerated: int
    """Generated and not trained."""
    dead_letters: int
    dropped_by_rule: int
    shows: tuple[str, ...]
    """What must not be, and is."""
    vitals: dict[str, dict[str, list[float]]]
    """Of each role, what its processes held in each sixth of the trial: medians."""
    covered_by: str
    """What was taken out along with the protection, or makes good its absence."""

    @property
    def is_clean(self) -> bool:
        return self.finished and not self.shows
