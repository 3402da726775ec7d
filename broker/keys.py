"""The table of Redis keys. A run lies under `headway:{RUN}:`; the braces make it one slot of a cluster.

The set `headway:runs` names all runs of the server; a learner adds its run, and `runs delete` takes it away.

Keys marked * lie under `headway:{RUN}:hidden:SECRET:`, prompts under `headway:{RUN}:prompt:SECRET:`. Workers may write
the former and read the latter, yet do not know their names: only the functions that they call do (`verbs`). SECRET is
128 random bits, made when a run is claimed for the first time, and deleted with the run.

key                   type    meaning                                            lifetime        written by
--------------------  ------  -------------------------------------------------  --------------  -------------
meta*                 hash    rules, versions, counters, state (below)           the run         most scripts
secret                string  SECRET, part of the names of hidden keys           the run         learner (SET)
verbs                 string  protocol, and name of the library of functions     the run         claim
identity              string  which run has the name now: 16 hexadecimal digits  the run         claim
hidden:of:IDENTITY    none    tells functions to which run the caller belongs    never stored    no process
holder                string  the learner's process: host, pid, user, since      30 s            LearnerHeartbeat
owner                 string  a digest of the owner's token                      the run         claim
tally*                hash    groups and samples, by length and lag              the run         lease, submit...
config                string  the resolved recipe                                the run         claim
prompt:G              string  the prompt of group G (frame)                      until settled   feed (SET)
group:G*              hash    all about group G but its blobs (below)            until settled   feed, lease...
pool*                 zset    groups not yet admitted; score 0 keeps feed order  until admitted  feed, lease
retry*                zset    samples any worker may lease, by admission number  until leased    lease, requeue
leases*               zset    samples leased, by deadline (server's clock)       until done      lease, renew
open*                 zset    unfinished groups that were begun, by floor        until ready     lease, submit
ready*                zset    finished groups by floor: taken oldest first       until taken     submit
batch:K*              list    groups pinned to step K                            until commit    take
pinned*               zset    the steps K that have a batch                      until commit    take
forks*                hash    incarnation -> the step that a rewind took it to   the run         announce
settled*              zset    groups trained that may be fed again               to watermark    commit
dropped*              zset    groups dropped that may be fed again               to watermark    take, drop
given_up*             zset    groups dropped, by floor: for displays             32 versions     take, drop
lost*                 set     groups to feed again: their prompt was damaged     until fed       mark_lost...
segments:G:R:I*       list    sample I's: `name bytes tokens author steps` each  until submit    append
segment:G:R:I:NONCE   string  a segment (frame)                                  TTL, submit     append (SET)
payload:G:R:I:NONCE   string  sample I of round R of group G (frame)             TTL, settled    submit (SET)
garbage*              list    blobs on other shards that are not needed          until freed     most scripts
stage:NONCE           string  a blob on its way to its key                       60 s            SET
manifest:offered      string  the weights being sent (frame)                     the run         offer
manifest:announced    string  the newest complete weights (frame)                the run         announce
broadcast             string  the broadcast group (frame)                        the run         put_group
meeting:NAME          hash    the learner's words to a group's members           an hour         create, set
joining:NAME:W*       hash    member W's words to the learner and to the others  an hour         rendezvous_set
joining:NAME*         hash    numbers that its members and the learner add to    an hour         rendezvous_set
fault:N               string  why a worker was set aside (JSON); N: 0 to f       an hour         report (SET)
durable               string  empty; a client waits until its write is on disk   1 s             make_durable
bell                  stream  one entry, new with every version and group         the run         version, put
archive*              set     names of the archived blobs of weights             until a claim   archive, claim
archive:NAME:N        string  a piece of an archived blob                        TTL, unlisted   archive (SET)
model                 string  model files without weights (frame)                the run         put_model
steps*                list    the last 512 StepMetrics (frames)                  the run         report_step
worker:W*             string  worker W's report of itself (frame)                heartbeat TTL   heartbeat
session:W*            string  the session that worker W's name belongs to        2 minutes       heartbeat
workers*              set     names of workers                                   a day           heartbeat
serving*              set     workers with a version that do not drain           a day           heartbeat...
dismissed*            hash    worker -> the session that was asked to drain      a day           exclude
pool:NAME*            string  the report of pool NAME's supervisor (frame)       its TTL         pool
pools*                set     names of pools                                     a day           pool
supervisors*          hash    pool -> the session of its supervisor              a day           pool
wanted*               hash    pool -> workers wanted                             a day           pool, scale
restarted*            hash    pool -> restarts of its supervisor so far          a day           pool
evaluations*          set     versions whose weights are evaluated               until ended     evaluate
evaluation:V*         hash    the evaluation of version V (below)                until ended     evaluate...
evaluating:V*         zset    its samples not done, by lease's deadline (0: none)  until done      evaluation_*
begun:V*              zset    those of them that were ever leased, by when       until done      evaluation_*
prompt:evaluation:V:N string  its prompt N (frame), where prompts lie            until ended     evaluate
scoring               none    tells functions that the caller is a scorer        never stored    no process
scoring:names*        set     names of scorers that were asked                   a day           score_ask
scoring:queue:NAME*   zset    requests not answered, by the time from which      until answered  score_ask...
                              a scorer may have them (a lease's deadline)
scoring:asked:NAME*   zset    its requests, by the time when they are forgotten  while asked     score_ask...
scoring:request:NAME:ID*  hash  one request (below)                              while asked     score_ask...
scoring:of:NAME:BY*   zset    those of asker BY, by the time when they came      while asked     score_ask...
scoring:askers:NAME*  hash    asker -> the bytes of its requests                 a day           score_ask...
scoring:counts:NAME*  hash    bytes, answered, failed, expired                   a day           score_*
scoring:scorer:W*     string  scorer process W's report of itself (frame)        its TTL         scorer
scoring:scorers*      set     names of scorer processes                          a day           scorer
turns*                zset    tokens of swap turns, by deadline                  its last turn   swap_turn
turns:begun*          zset    these, by when they began                          its last turn   swap_turn
turns:others*         zset    tokens of turns that no serving worker asked for   its last turn   swap_turn
turns:begun:others*   zset    these, by when they began                          its last turn   swap_turn
turns:asking*         zset    workers that wait for a turn, by when they asked   a minute        swap_turn
turns:last*           zset    workers by when they last got a turn               an hour         swap_turn
phase*                string  in a colocated run: engines may generate (server's id)  until renewed   phase
awake*                zset    in a colocated run: awake workers (holders), by deadline  a day         awake, phase
dead*                 stream  dead letters: tid, worker, reason, first bytes     last 1000       reject...
                              blamed: a digest of the holder, if it is its fault
strikes*              hash    refused samples by holder: name and session        the run         reject, submit...
quarantined*          set     holders that get no more leases                    the run         reject, submit...
refused*              set     samples (G:I) that the learner refused once        until settled   reject
standing*             zset    holders whose samples were trained, by the time    10 minutes      take, commit, lease
                              when they last asked for leases

Fields of `meta`: incarnation; announced_* and offered_* (incarnation, step, by: a digest of the token); group (another
text whenever a broadcast group is stored); the rules (`schema.RunRules`); the counters admitted, dropped, uninformative
(of these), trained, requeued, expired_leases, copied_leases, fenced, rejected, highest_step (of all versions ever
offered or announced), payload_bytes, generated_tokens, wasted_tokens, resumed_tokens, discarded_tokens,
trimmed_samples, skipped_evaluations, worker_restarts; skipped_evaluation (the last version that it counts);
archive_bytes; feed_closed, watermark, committed_step, newest_step (highest of the weights that have sampled),
is_rewound, state, started, adopted (the server's id when a learner last told it all that it knows); recipe (a digest of
`config`); claimed_at, announced_at, pinned_at, waiting_since (when the learner first asked for a batch that is not
ready; the server's clock).

Fields of `group:G`: size, length (of the prompt, up to a power of two), prompt (a digest of its frame), round, state
(pool, open, ready, pinned; lost: without its prompt), index (admission number), queued_at (when its round's samples
were offered to workers; server's clock), floor (lowest weight step in this round), newest (highest), bytes, done,
trimmed, ready_at (when it had all its samples), by_step (what each step's weights sampled of it:
`STEP:SAMPLES:TOKENS...`), waited (seconds from then until it was taken), pin (step); for each sample I token:I (it says
for which incarnation's weights and when it was given), step:I (the lowest of its lease and segments, then of its
submission), oldest:I (lowest of its segments), by:I (its last holder: name and session, with a `?` behind a name that
belongs to another session), since:I (when a segment brought it tokens), calls:I (digests of an agent's calls that
ran when its holder, whose token stands before them, began the last one), and once submitted bytes:I, payload:I and
tokens:I (what each version sampled, as `measures` in `calls.lua` has it).

Fields of `evaluation:V`: size (samples), samples (of each prompt), done, mixed (samples that had tokens of other
versions), keep (seconds for which workers keep the version), seen (when a worker last had a sample for no longer than
that, or handed one in; server's clock); for each sample I token:I and by:I (holder) of its newest lease, and once done
result:I (`passed reward tokens`).

Fields of `scoring:request:NAME:ID`: frame (tokens; until it ends), bytes, since (when it was asked; server's clock),
by (its asker: a living worker, '?' for others, '' for the learner), hold (the seconds for which a scorer may have it),
tries (leases so far), token of its newest lease (it begins with a digest of the scorer's session), leased (when),
reason (why the last scorer gave it up), and once it has ended answered (float32 values) or failed (why).

With `payload_shards` above 1, payloads and segments lie under `headway:{RUN/N}:` instead, so that a cluster spreads
them over its nodes. Their names then begin with `N/`, scripts put names of blobs to be freed on the garbage list, and
the learner frees these.

A worker's user can store more than this table says: hidden keys without the secret, blobs that no script records, or
with no time to live. The learner frees these once a minute (`free_orphans`).
"""

import re
from zlib import crc32

from .errors import BrokerError

PREFIX = "headway:"
RUNS = f"{PREFIX}runs"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_name(text: str) -> bool:
    """Returns whether `text` is a valid name for a run or a worker."""
    return _NAME.fullmatch(text) is not None


def check_name(name: str, kind: str) -> str:
    """Returns the name of a run, a worker or a pool, if it is one. Raises BrokerError."""
    if not is_name(name):
        raise BrokerError(
            f"{name[:200]!r} is no name for a {kind}: use 1 to 100 letters, digits, '.', '_' or '-', "
            "the first of them a letter or digit."
        )
    return name


class Keys:
    """The full key names of one run."""

    def __init__(self, run: str) -> None:
        self.run = check_name(run, "run")
        self.prefix = f"{PREFIX}{{{run}}}:"
        self.verbs = self("verbs")
        self.secret = ""
        """The run's secret, known to a learner that has claimed the run; "" for all others."""

    def __call__(self, name: str) -> str:
        return self.prefix + name

    def hidden(self, name: str) -> str:
        """Returns a key that only functions write. For the run's learner."""
        assert self.secret, "only a learner that has claimed the run knows hidden keys"
        return f"{self.prefix}hidden:{self.secret}:{name}"

    def prompt(self, group: str) -> str:
        """Returns the key of a group's prompt. For the run's learner."""
        assert self.secret, "only a learner that has claimed the run knows where prompts lie"
        return f"{self.prefix}prompt:{self.secret}:{group}"

    def of(self, identity: str) -> str:
        """Returns the key with which functions are called: it names the slot, and the identity of the caller's run.
        Nothing is stored under it."""
        return self(f"hidden:of:{identity}")

    def blob(self, name: str) -> str:
        """Returns the key of a payload or segment; `name` is the one that scripts use."""
        shard, slash, rest = name.partition("/")
        return f"{PREFIX}{{{self.run}/{shard}}}:{rest}" if slash else self(name)


def blob_name(kind: str, tid: object, nonce: str, shards: int) -> str:
    """Returns a name for a new payload or segment; over several shards it begins with `N/`."""
    name = f"{kind}:{tid}:{nonce}"
    return name if shards == 1 else f"{crc32(name.encode()) % shards}/{name}"
