"""`headway generate --workers N`: this machine's workers, and the server for them, around a batch inference."""

import hashlib
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from headway.broker.connection.address import without_password
from headway.broker.server.access import Role
from headway.deploy.launch.commands import WorkerCommand, engine_gpus
from headway.deploy.launch.kept_server import KeptServer
from headway.deploy.launch.pool import Pool
from headway.deploy.launch.supervisor import Supervisor
from headway.deploy.printing import say
from headway.deploy.recipe.colocation import worker_gpus
from headway.deploy.recipe.operators import passed_on
from headway.deploy.recipe.pools import MAIN
from headway.deploy.recipe.recipe import Recipe

from .generating import Generated


def run_name(out: Path) -> str:
    """Return the name of the run that writes this file; it is the same whenever the file is continued."""
    place = f"{socket.gethostname()}:{out.resolve()}"
    return f"generate-{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}"


def _tell(text: str) -> None:
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
            server = None if self.url else stack.enter_context(KeptServer(private / "server", _tell))
            learner, worker = (self._url_of(role, server) for role in (Role.LEARNER, Role.WORKER))
            if self.url:
                shown = without_password(self.url)
                _tell(f"Workers elsewhere join by: headway workers --broker {shown} --run {self.recipe.run.name}")
            if not self.count:
                return generate(learner)
            pool = Pool(MAIN, self.count, self._command(worker, private))
            thread = threading.Thread(target=self._generate, args=(generate, learner, pool), daemon=True)
            thread.start()
            self._supervise(pool, server)
        return self._result

    def _supervise(self, pool: Pool, server: KeptServer | None) -> None:
        """Keep the workers alive until the answers are there, or a signal comes."""

        def check() -> None:
            if self._error is not None:
                raise self._error
            if server is not None:
                server.check()

        def tell(text: str) -> None:
            if self._result is None:  # else workers leave as they should
                _tell(text)

        Supervisor([pool], max_restarts=self.recipe.workers.max_restarts, say=tell, check=check).run()

    def _generate(self, generate: Callable[[str], Generated], url: str, pool: Pool) -> None:
        """Generate in a thread of its own, since children are started and watched in the main one."""
        try:
            self._result = generate(url)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._error = error
        else:
            pool.wanted, pool.is_run_over = 0, True

    def _url_of(self, role: Role, server: KeptServer | None) -> str:
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
