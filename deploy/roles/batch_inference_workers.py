"""`headway generate` with workers: they sample the responses to a file of prompts in a run that trains nothing. With
`--workers N` this command starts N workers on this machine, and a server for them.

    this process   claim ─► publish the model ─► feed prompts, a few ahead ─► take ─► a line ─► commit ─► finished
    workers        pull the model ─► lease ─► generate ─► submit ─► lease ...

It has the learner's place in the run, so the broker's promises hold: a lease goes to another worker if its own is
killed, one submission counts for each sample, and a finished group is handed over until it is committed. A prompt is
committed once its line is in the file, and the file says what is done: the next process feeds only what it lacks.
"""

import hashlib
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from headway.broker import BlockingBroker
from headway.broker.client.learner import NotReady, TakenBatch
from headway.broker.client.supervision import LearnerInfo
from headway.broker.config import StalenessConfig
from headway.broker.connection.address import without_password
from headway.broker.errors import RunNotFoundError
from headway.broker.schema import CheckpointMark, Group, Owner, Prompt, SampleLimits, WeightVersion
from headway.broker.schema.weights import Probe
from headway.broker.server.access import Role
from headway.deploy.launch.broker_server import SupervisedServer
from headway.deploy.launch.commands import WorkerCommand, engine_gpus
from headway.deploy.launch.local_run import forget
from headway.deploy.launch.process_pool import Pool
from headway.deploy.launch.supervisor import Supervisor
from headway.deploy.printing import say
from headway.deploy.recipe.placement import worker_gpus
from headway.deploy.recipe.pools import MAIN
from headway.deploy.recipe.recipe import Recipe, RunConfig
from headway.deploy.recipe.resolve import recipe_to_bytes
from headway.deploy.recipe.trust import passed_on
from headway.deploy.run.run_directory import refuse_if_in_use
from headway.learner.backends.adapter import open_weights
from headway.learner.config import LearnerConfig, ModelConfig
from headway.learner.data.prompts.cursor import group_at, place_of
from headway.learner.experience.broker_retries import BrokerRetries
from headway.learner.models.model_files import model_files
from headway.learner.models.pretrained import load_config
from headway.rollout_workers.config import EvalConfig
from headway.weightsync.publisher import Publisher

from .batch_inference import Add, Generated, response_of
from .learner import rules_of
from .trained_model import PoolSettings, TrainedModel, own_decoding

POLL_S = 0.01
AHEAD = 1024
"""The most prompts that wait in the broker for a lease."""
REMEMBERED = 1024
"""Commits that a restarted server is told again: it can lose those of its last second."""
NEVER_S = 30 * 86400.0
UNBOUNDED = 1 << 30
"""Steps of lag. Each prompt is a step here, and the first weights sample all of them."""
LINGER_S = 0.5
"""Seconds for a worker that has left the list to say the rest of its goodbye."""
LEAVE_S = 10.0
"""Seconds for workers to hear that nothing is left, before their run is removed from the server."""


def generation_recipe(model: TrainedModel, settings: PoolSettings, *, run: str, samples: int, seed: int) -> Recipe:
    """Return the configuration of the run, which its workers read."""
    replace = msgspec.structs.replace
    sampling = replace(settings.sampling, seed=seed)
    if sampling.temperature == 0:  # greedy: a run's temperature is above 0, as logprobs are divided by it
        sampling = replace(sampling, temperature=1.0, top_k=1)
    return Recipe(
        run=RunConfig(name=run, seed=seed),
        model=ModelConfig(path=str(model.path)),
        engine=settings.engine,
        sampling=sampling,
        # Without segments a killed worker's sample starts anew, and becomes the one that its seed gives.
        workers=replace(settings.workers, segment_tokens=0, segment_s=0.0, patience_s=0.0),
        broker=replace(settings.broker, url="embedded", lease_hold_s=NEVER_S),
        weights=replace(settings.weights, transport="gloo", staging="host", follow="pull", archive="none"),
        staleness=StalenessConfig(max_lag=UNBOUNDED),
        learner=LearnerConfig(groups_per_step=1, group_size=samples),
        evaluation=EvalConfig(prompts=0),
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSampler:
    """Samples with all workers of a run, which may come and go."""

    url: str
    """The server's, with the learner's user."""
    recipe: Recipe

    def sample(self, prompts: Mapping[int, Prompt], add: Add, *, made_from: str) -> None:
        """See Sampler. It waits for workers, and for a server that is away."""
        self._forget_an_earlier_run(made_from)
        with ExitStack() as stack:
            blocking = BlockingBroker(self.url, self.recipe.run.name)
            stack.callback(blocking.close)
            job = _GenerationRun(blocking, self.recipe, prompts, identity=made_from)
            stack.callback(job.publish().close)
            job.collect(add)
            job.finish()

    def _forget_an_earlier_run(self, identity: str) -> None:
        """Remove what a killed process has left of a run of the name; its workers go on. Raises HeadwayError where that
        run is in use: another one by any process, this one by a process that answers prompts now."""
        run = self.recipe.run.name
        with closing(BlockingBroker(self.url, run)) as blocking:
            held = blocking.call(blocking.broker.join())
        if held:
            refuse_if_in_use(self.url, run, by_workers=held != identity)
            forget(self.url, run)


class _GenerationRun:
    """The run's prompts that are left, with this process in the learner's place."""

    def __init__(
        self, blocking: BlockingBroker, recipe: Recipe, prompts: Mapping[int, Prompt], *, identity: str
    ) -> None:
        """Begin the run. Its identity says what decides the responses, so workers of a killed process go on with the
        weights that they hold if, and only if, these are the right ones. Raises BrokerError."""
        self._blocking = blocking
        self._verbs = blocking.broker
        self._recipe = recipe
        self._left = dict(sorted(prompts.items()))
        self._unfed = iter(tuple(self._left.values()))
        self._is_fed = False
        self._outages = BrokerRetries(blocking, lambda: False, self._restore_server)
        self._committed: deque[str] = deque(maxlen=REMEMBERED)
        self._limits = SampleLimits(
            vocabulary=getattr(load_config(recipe.model).get_text_config(), "vocab_size", None),
            max_new_tokens=recipe.sampling.max_new_tokens,
        )
        self._decoding = own_decoding(recipe.model, recipe.sampling)
        self._owner = self._claim(identity)
        self._version = WeightVersion(self._owner.incarnation, 0)

    def publish(self) -> Publisher:
        """Give workers the model, and return what serves it to them until it is closed."""
        model = self._recipe.model
        files = msgspec.structs.replace(model_files(model), limits=self._limits)
        self._outages.retry(lambda: self._verbs.versions.put_model(self._owner, files))
        self._feed()  # before any worker asks, so that they begin with the first prompts
        publisher = Publisher(self._blocking, self._owner, self._recipe.weights)
        tensors = open_weights(model.path)
        assert tensors is not None, "the parent has looked"
        gathering = publisher.gather((name, tensors(name)) for name in sorted(tensors.names))
        token = next(iter(self._left.values())).token_ids[0]
        probe = Probe(token_ids=[token], logprobs=[], tolerance=0.0)  # a single token predicts none
        self._outages.retry_until_available(lambda: publisher.publish(self._version, gathering, probe))
        self._outages.retry(lambda: self._verbs.status.set_state(self._owner, "training"))
        return publisher

    def collect(self, add: Add) -> None:
        """Hand each prompt to `add` once, and commit it afterwards, until none is left."""
        step = 0
        while self._left:
            taken = self._take(step)
            if isinstance(taken, NotReady):
                self._feed()
                time.sleep(POLL_S)
                continue
            for group in taken.groups:
                self._hand_over(group, add)
            step += 1
            self._commit(step, [group.prompt.group for group in taken.groups])

    def finish(self) -> None:
        """End the run, and remove it from the server once its workers have heard of that."""
        self._outages.retry(lambda: self._verbs.status.set_state(self._owner, "finished"))
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until:
            with suppress(RunNotFoundError):
                if self._outages.retry(self._verbs.status.snapshot).workers:
                    time.sleep(POLL_S)
                    continue
            time.sleep(LINGER_S)
            self._blocking.call(self._verbs.status.delete_run())
            return

    def _claim(self, identity: str) -> Owner:
        claim = self._blocking.call(
            self._verbs.batches.claim(
                checkpoint=CheckpointMark(0, 0),
                rules=rules_of(self._recipe),
                config=recipe_to_bytes(self._recipe),
                resume=False,
                identity=identity,
            )
        )
        self._verbs.batches.limits = self._limits
        self._verbs.garbage.storage.payload_ttl_s = self._recipe.broker.payload_ttl_s
        self._blocking.call(self._verbs.heartbeat.begin(LearnerInfo.this_process()))
        self._blocking.call(self._verbs.garbage.begin(claim.owner))
        return claim.owner

    def _feed(self) -> None:
        """Keep the broker supplied with prompts, and close the feed after the last one."""
        if self._is_fed:
            return
        waiting, _ = self._outages.retry(self._verbs.prompts.waiting)
        if waiting > AHEAD // 2:
            return
        if prompts := list(islice(self._unfed, AHEAD - waiting)):
            self._outages.retry(lambda: self._verbs.prompts.feed(prompts, self._owner))
        else:
            self._outages.retry(lambda: self._verbs.prompts.close_feed(self._owner))
            self._is_fed = True

    def _take(self, step: int) -> TakenBatch | NotReady:
        return self._outages.retry(lambda: self._verbs.batches.take(self._owner, step, 1))

    def _hand_over(self, group: Group, add: Add) -> None:
        """Add the prompt's responses, unless a server that has lost its last second delivers it again."""
        _, index = place_of(group.prompt.group)
        if self._left.pop(index, None) is not None:
            add(
                index,
                [
                    response_of(self._decoding, one.response_tokens.tolist(), one.finish_reason)
                    for one in group.trajectories
                ],
            )

    def _commit(self, step: int, groups: Sequence[str]) -> None:
        """Let the broker forget groups whose lines are written."""
        lowest = next(iter(self._left), None)
        watermark = None if lowest is None else group_at((0, lowest))
        self._committed.extend(groups)
        self._outages.retry(lambda: self._verbs.batches.commit(self._owner, step, groups, watermark))

    def _restore_server(self) -> None:
        """Tell a restarted server what it may have forgotten, and feed all prompts that are left again."""
        self._outages.retry(
            lambda: self._verbs.batches.reassert(
                self._owner, announced=self._version, committed_groups=tuple(self._committed), pinned={}
            )
        )
        self._unfed, self._is_fed = iter(tuple(self._left.values())), False


def run_name(out: Path) -> str:
    """Return the name of the run that writes this file; it is the same whenever the file is continued."""
    place = f"{socket.gethostname()}:{out.resolve()}"
    return f"generate-{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}"


def _say(text: str) -> None:
    say(text, to_stderr=True)


@dataclass(kw_only=True)
class GenerationPool:
    """The processes of one batch inference."""

    recipe: Recipe
    count: int
    """Workers on this machine."""
    url: str | None
    """A server that runs, where workers of other machines join; None: one of our own."""
    logs: Path
    devices: str
    """CUDA_VISIBLE_DEVICES of this process."""
    _result: Generated | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)

    def run(self, generate: Callable[[str], Generated]) -> Generated | None:
        """Return what `generate` does by the server at a URL, with the workers beside it; None where a signal has
        stopped it before. Raises what `generate` raises, and RoleFailedError for workers that keep failing."""
        with ExitStack() as stack:
            private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-generate-")))
            server = None if self.url else stack.enter_context(SupervisedServer(private / "server", _say))
            learner, worker = (self._url_of(role, server) for role in (Role.LEARNER, Role.WORKER))
            if self.url:
                shown = without_password(self.url)
                _say(f"Workers elsewhere join by: headway workers --broker {shown} --run {self.recipe.run.name}")
            if not self.count:
                return generate(learner)
            pool = Pool(MAIN, self.count, self._command(worker, private))
            thread = threading.Thread(target=self._generate, args=(generate, learner, pool), daemon=True)
            thread.start()
            self._supervise(pool, server)
        return self._result

    def _supervise(self, pool: Pool, server: SupervisedServer | None) -> None:
        """Keep the workers alive until the answers are there, or a signal comes."""

        def check() -> None:
            if self._error is not None:
                raise self._error
            if server is not None:
                server.check()

        def say_while_generating(text: str) -> None:
            if self._result is None:  # else workers leave as they should
                _say(text)

        Supervisor([pool], max_restarts=self.recipe.workers.max_restarts, say=say_while_generating, check=check).run()

    def _generate(self, generate: Callable[[str], Generated], url: str, pool: Pool) -> None:
        """Generate in a thread of its own, since children are started and watched in the main one."""
        try:
            self._result = generate(url)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._error = error
        else:
            pool.wanted, pool.is_run_over = 0, True

    def _url_of(self, role: Role, server: SupervisedServer | None) -> str:
        if server is not None:
            return server.url_of(role)
        assert self.url is not None
        return self.url

    def _command(self, url: str, private: Path) -> WorkerCommand:
        return WorkerCommand(
            url=url,
            run=self.recipe.run.name,
            arguments=passed_on(self.recipe),
            private=private,
            logs=self.logs,
            threads=self.recipe.engine.threads,
            devices=worker_gpus(self.recipe, self.devices),
            gpus=engine_gpus(self.recipe.engine),
        )
