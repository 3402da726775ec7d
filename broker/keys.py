"""The table of Redis keys. A run lies under `headway:{RUN}:`; the braces make it one slot of a cluster.

key                  type    meaning                                            lifetime        written by
-------------------  ------  -------------------------------------------------  --------------  -------------
meta                 hash    owner, rules, versions, counters, state (below)    the run         most scripts
config               string  the resolved recipe                                the run         claim
prompt:G             string  the prompt of group G (frame)                      until settled   feed (SET)
group:G              hash    all about group G but its blobs (below)            until settled   feed, lease...
pool                 zset    groups not yet admitted; score 0 keeps feed order  until admitted  feed, lease
retry                zset    samples without a lease, by admission number       until leased    lease, requeue
leases               zset    samples leased, by deadline (server's clock)       until done      lease, renew
open                 zset    unfinished groups that were begun, by floor        until ready     lease, submit
ready                zset    finished groups by floor: taken oldest first       until taken     submit
batch:K              list    groups pinned to step K                            until commit    take
pinned               zset    the steps K that have a batch                      until commit    take
forks                hash    incarnation -> the step that a rewind took it to      the run         announce
settled              zset    groups trained or dropped that may be fed again    to watermark    commit, take
payload:G:R:I:NONCE  string  sample I of round R of group G (frame)             TTL, settled    submit (SET)
stage:NONCE          string  a blob on its way to its key                       60 s            SET
manifest:offered     string  the weights being sent (frame)                     the run         offer
manifest:announced   string  the newest complete weights (frame)                the run         announce
broadcast            string  the broadcast group (frame)                        the run         put_group
model                string  model files without weights (frame)                the run         put_model
steps                list    the last 512 StepMetrics (frames)                  the run         report_step
worker:W             string  what worker W says of itself (frame)               heartbeat TTL   heartbeat
workers              set     names of workers                                   a day           heartbeat
dead                 stream  undecodable payloads: tid, reason, first bytes     last 1000       reject

Fields of `meta`: incarnation, owner; announced_* and offered_* (incarnation, step, by); the rules max_lag,
groups_per_step, on_straggler, on_over_bound, max_bytes; the counters admitted, dropped, trained, requeued,
submitted, expired_leases, fenced, rejected, payload_bytes, generated_tokens, wasted_tokens; feed_closed,
watermark, committed_step, state, started.

Fields of `group:G`: size, round, state (pool, open, ready, pinned), index (admission number), floor (lowest
weight step in this round), newest (highest), bytes, done, pin (step); for each sample I token:I and step:I
(of its lease, then of its submission) and payload:I (once submitted).
"""

import re

from .errors import BrokerError

PREFIX = "headway:"
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_run_name(run: str) -> str:
    """The name itself, if it is one."""
    if not _RUN_NAME.fullmatch(run):
        raise BrokerError(
            f"{run!r} is no name for a run: use 1 to 100 letters, digits, '.', '_' or '-', "
            "the first of them a letter or digit."
        )
    return run


class Keys:
    """Full key names of one run."""

    def __init__(self, run: str) -> None:
        self.prefix = f"{PREFIX}{{{check_run_name(run)}}}:"
        self.meta = self("meta")

    def __call__(self, name: str) -> str:
        return self.prefix + name


def run_of(meta_key: str) -> str:
    """The run whose meta hash this is."""
    return meta_key.removeprefix(PREFIX).removesuffix(":meta").strip("{}")
