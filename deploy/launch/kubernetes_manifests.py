"""The manifests of a run on Kubernetes: those of `deploy/kubernetes/`, and the few files that a recipe decides.

    DIRECTORY/   kustomization.yaml   image, namespace, the run's name; makes Secrets and ConfigMaps of the files below
                 recipe.yaml          the recipe as the learner's pod reads it
                 learner.yaml         a patch: CPUs and GPUs of the learner
                 pools/NAME/          a pool's number of workers, their arguments, CPUs and GPUs; what KEDA reads
                 scorers/NAME/        the same of a reward model or the teacher
                 rayjob.yaml          with --ray, instead of learner.yaml, pools/ and scorers/
                 base/                as it is shipped
                     broker/      Valkey: a StatefulSet with its data on a volume
                     learner/     a StatefulSet with the run's directory on a volume; learner.sh resumes a run
                     workers/     a pool: a Deployment, of which each pod is one worker
                     scorers/     a reward model or a teacher: a Deployment, of which each pod scores
                     autoscaler/  `headway autoscale --serve` for a pool, which KEDA asks
                     ray/         a RayJob of KubeRay in place of learner and workers, which runs `headway ray up`
                     network/     who may reach whom
                 secrets/             passwords, users and the server's certificate; kept by later launches

`kubectl apply -k DIRECTORY` starts the run. The invariant: no shipped manifest contains a password, a recipe or the
name of a run. Kustomize makes Secrets and ConfigMaps of files of the directory.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace

from headway.broker.errors import ConfigError
from headway.broker.server.access import Credentials, Role, User
from headway.deploy.recipe.parse import to_yaml
from headway.deploy.recipe.pools import MAIN, WORKER, check_models_for_pods, pools_of
from headway.deploy.recipe.recipe import Recipe, SinkConfig
from headway.deploy.recipe.resolve import dump_recipe
from headway.deploy.run.run_directory import writable
from headway.learner.disk import replace_file

from .base import Resources
from .commands import check_for_cluster, learner_resources, process_groups

GPU = "nvidia.com/gpu"
AUTOSCALER_PORT = 8080
KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


@dataclass(frozen=True, kw_only=True)
class WorkerPods:
    """The Deployment of one pool."""

    name: str
    count: int
    arguments: Sequence[str]
    resources: Resources
    namespace: str
    most: int | None
    """The most workers to which KEDA scales it; None: KEDA does not."""

    @property
    def place(self) -> str:
        return f"pools/{label_of(self.name)}"

    @property
    def suffix(self) -> str:
        return "" if self.name == MAIN else f"-{label_of(self.name)}"

    def files(self) -> dict[str, Any]:
        """Return the content of each file."""
        label = label_of(self.name)
        patches, resources = [{"path": "workers.yaml"}], ["../../base/workers"]
        written: dict[str, Any] = {"workers.yaml": self._workers(label)}
        if self.most is not None:
            patches.append({"path": "autoscaler.yaml"})
            resources += ["../../base/autoscaler", "scaledobject.yaml"]
            written["autoscaler.yaml"] = self._autoscaler(label, self.most)
            written["scaledobject.yaml"] = self._scaled_object(self.most)
        own = {
            "resources": resources,
            **({"nameSuffix": self.suffix} if self.suffix else {}),
            "labels": [{"pairs": {"headway/pool": label}, "includeSelectors": True}],
            "patches": patches,
        }
        return {"kustomization.yaml": KUSTOMIZATION | own, **written}

    def _workers(self, label: str) -> dict[str, Any]:
        arguments = [f"--pool={label}.$(POD_NAME)", *map(_literal, self.arguments)]
        patched = patch("Deployment", "headway-workers", "worker", self.resources, arguments)
        if self.most is None:
            patched["spec"]["replicas"] = self.count
        return patched

    def _autoscaler(self, label: str, most: int) -> dict[str, Any]:
        container = {"name": "autoscaler", "args": [f"--pool={label}", f"--most={most}"]}
        return on_containers("Deployment", "headway-autoscaler", container)

    def _scaled_object(self, most: int) -> dict[str, Any]:
        """Return what KEDA reads. It takes the number wanted as the number of pods, and waits for nothing besides: the
        rule has waited already."""
        url = f"http://headway-autoscaler{self.suffix}.{self.namespace}.svc:{AUTOSCALER_PORT}/"
        trigger = {
            "type": "metrics-api",
            "metricType": "AverageValue",
            "metadata": {"url": url, "valueLocation": "wanted", "targetValue": "1"},
        }
        behaviour = {"scaleDown": {"stabilizationWindowSeconds": 0}}
        spec = {
            "scaleTargetRef": {"name": f"headway-workers{self.suffix}"},
            "minReplicaCount": 0,
            "maxReplicaCount": most,
            "pollingInterval": 10,
            "cooldownPeriod": 60,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behaviour}},
            "triggers": [trigger],
        }
        return {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": {"name": "headway-workers"},
            "spec": spec,
        }


@dataclass(frozen=True, kw_only=True)
class ScorerPods:
    """The Deployment of one scorer."""

    name: str
    count: int
    arguments: Sequence[str]
    resources: Resources

    @property
    def place(self) -> str:
        return f"scorers/{label_of(self.name)}"

    def files(self) -> dict[str, Any]:
        """Return the content of each file."""
        arguments = [f"--scorer={self.name}", *map(_literal, self.arguments)]
        patched = patch("Deployment", "headway-scorers", "scorer", self.resources, arguments)
        patched["spec"]["replicas"] = self.count
        own = {
            "resources": ["../../base/scorers"],
            "nameSuffix": f"-{label_of(self.name)}",
            "labels": [{"pairs": {"headway/scorer": label_of(self.name)}, "includeSelectors": True}],
            "patches": [{"path": "scorers.yaml"}],
        }
        return {"kustomization.yaml": KUSTOMIZATION | own, "scorers.yaml": patched}


def label_of(name: str) -> str:
    """Return the name in the characters of a DNS label, such as a part of a pod's name must have."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:30].rstrip("-")


def cpus_of(resources: Resources) -> str:
    """Return the CPUs of a container, as Kubernetes writes them."""
    return f"{(resources.threads or 1) * resources.processes}"


def patch(kind: str, name: str, container: str, resources: Resources, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Return a strategic merge patch that sets the resources of a container, and its arguments if there are any."""
    gpus = {"limits": {GPU: resources.gpus}} if resources.gpus else {}
    requested = {"requests": {"cpu": cpus_of(resources)}, **gpus}
    own = {"args": list(arguments)} if arguments else {}
    return on_containers(kind, name, {"name": container, "resources": requested, **own})


def on_containers(kind: str, name: str, container: dict[str, Any]) -> dict[str, Any]:
    """Return a strategic merge patch that sets these fields of a container."""
    spec = {"template": {"spec": {"containers": [container]}}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def _literal(argument: str) -> str:
    """Return an argument of a container, in which $(NAME) is a variable."""
    return argument.replace("$", "$$")


IMAGE = "headway"
"""The name that stands for Headway's image in the manifests."""
BROKER_HOST = "headway-broker"
RAY_BROKER = (
    f"rediss://{User(Role.LEARNER, None, '').name}@{BROKER_HOST}:6379"
    "?password_file=/etc/headway/broker/password&ssl_ca_certs=/etc/headway/broker/ca.crt"
)
"""The broker's URL in a RayJob, whose processes share one user."""
METRICS_PORT = 9464
"""The port at which learner and workers serve metrics, which are also the answer to probes."""
PULL_PORTS = (40000, 40009)
"""Ports at which the learner serves weights: among those that the network policies leave to the system's choice."""
SECRETS = "secrets"
SERVER_FILES = ("users.acl", "tls.crt", "tls.key")
_HEADER = "# Written by `headway launch kubernetes`, which writes it anew at each launch.\n"


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The user's wishes for the cluster."""

    image: str
    """Headway's image, as REPOSITORY[:TAG] or REPOSITORY@DIGEST."""
    namespace: str = ""
    """Empty: the one that kubectl uses."""
    pools: Mapping[str, int]
    """Workers of a pool, instead of the recipe's number."""
    keda: Mapping[str, int] = field(default_factory=dict)
    """The most workers of each pool that KEDA scales."""
    has_ray: bool = False
    """Whether a RayJob of KubeRay has the learner and the workers."""


def write_manifests(recipe: Recipe, directory: Path, options: KubernetesOptions) -> list[Path]:
    """Write all files and return the paths of those that are no secrets, kustomization.yaml first. Secrets that are
    there already are kept.

    Raises ConfigError for a recipe or options that do not fit a cluster.
    """
    texts = manifests(recipe, options)
    with writable(directory, "--output"):
        directory.mkdir(parents=True, exist_ok=True)
        _make_secrets(directory / SECRETS)
        for name, text in texts.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(directory / name, text.encode())
    return [directory / name for name in texts]


def manifests(recipe: Recipe, options: KubernetesOptions) -> dict[str, str]:
    """Return the text of each file but the secrets, by its path below the launch directory. Raises ConfigError."""
    _check(recipe, options)
    deployments = list(_deployments(recipe, options))
    contents: dict[str, Any] = {"kustomization.yaml": _kustomization(recipe, options, deployments)}
    if options.has_ray:
        contents["rayjob.yaml"] = _ray_job(recipe, [pods for pods in deployments if isinstance(pods, WorkerPods)])
    else:
        contents["learner.yaml"] = patch("StatefulSet", "headway-learner", "learner", learner_resources(recipe))
        for pods in deployments:
            contents |= {f"{pods.place}/{name}": content for name, content in pods.files().items()}
    written = {name: _yaml(content) for name, content in contents.items()}
    written["recipe.yaml"] = dump_recipe(_for_pods(recipe, options))
    return written | dict(_shipped(_BASE, "base"))


_BASE = files("headway.deploy") / "kubernetes" / "base"


def _check(recipe: Recipe, options: KubernetesOptions) -> None:
    if not options.has_ray:
        check_models_for_pods(recipe)
    check_for_cluster(recipe, "kubernetes", "pods", {*options.pools, *options.keda})
    names = [MAIN, *(pool.name for pool in pools_of(recipe))]
    labels = [label_of(name) for name in names]
    if twice := [name for name, label in zip(names, labels, strict=True) if labels.count(label) > 1]:
        raise ConfigError(f"The names of the pools {' and '.join(twice)} are the same on Kubernetes: change one.")
    if not re.fullmatch(r"[a-z0-9][\w./:-]*(@sha256:[0-9a-f]{64})?", options.image):
        raise ConfigError(f"--image {options.image!r} is no image: give one such as registry.example/headway:0.1.0.")
    if options.has_ray and options.keda:
        raise ConfigError("With --ray, Ray places the workers: leave --keda out.")
    if options.keda and not options.namespace:
        raise ConfigError("KEDA asks from another namespace: name this run's own with --namespace.")
    if options.namespace and options.namespace != label_of(options.namespace):
        raise ConfigError(f"--namespace {options.namespace!r} must be lower-case letters, digits and dashes.")


def _for_pods(recipe: Recipe, options: KubernetesOptions) -> Recipe:
    """Return the recipe with what pods decide: where the run's directory is, which ports are open, and who may ask for
    metrics, which the network policies restrict."""
    sinks = [sink for sink in recipe.metrics if sink.kind != "prometheus"]
    metrics = SinkConfig(kind="prometheus", options={"host": "0.0.0.0", "port": METRICS_PORT})
    return replace(
        recipe,
        run=replace(recipe.run, directory="runs"),
        broker=replace(recipe.broker, url=RAY_BROKER) if options.has_ray else recipe.broker,
        weights=replace(recipe.weights, host=None, ports=PULL_PORTS),
        metrics=(*sinks, metrics),
    )


def _deployments(recipe: Recipe, options: KubernetesOptions) -> "Iterator[WorkerPods | ScorerPods]":
    served = [f"workers.metrics_port={METRICS_PORT}", "workers.metrics_host=0.0.0.0"]
    for group in process_groups(recipe):
        if group.role == WORKER:
            yield WorkerPods(
                name=group.name,
                count=options.pools.get(group.name, group.count),
                arguments=[*group.arguments, *served],
                resources=group.resources,
                namespace=options.namespace,
                most=options.keda.get(group.name),
            )
        elif group.count:
            yield ScorerPods(name=group.name, count=group.count, arguments=group.arguments, resources=group.resources)


def _ray_job(recipe: Recipe, pools: Sequence[WorkerPods]) -> Any:
    """Return the RayJob: its head has room for the learner, and each pod of a group for one worker of its pool."""
    job = yaml.safe_load((_BASE / "ray" / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    cluster["headGroupSpec"] = _with_room(cluster["headGroupSpec"], learner_resources(recipe))
    cluster["workerGroupSpecs"] = [
        _with_room(group, pool.resources)
        | {
            "groupName": label_of(pool.name),
            "replicas": pool.count,
            "minReplicas": pool.count,
            "maxReplicas": pool.count,
        }
        for pool in pools
    ]
    return job


def _with_room(group: dict[str, Any], resources: Resources) -> dict[str, Any]:
    """Return a copy of the group whose pods have these CPUs and GPUs. Ray counts CPUs by their limit."""
    own = deepcopy(group)
    (container,) = own["template"]["spec"]["containers"]
    cpus = cpus_of(resources)
    container["resources"]["requests"]["cpu"] = cpus
    container["resources"]["limits"] = {"cpu": cpus, **({GPU: resources.gpus} if resources.gpus else {})}
    return own


def _kustomization(
    recipe: Recipe, options: KubernetesOptions, deployments: Sequence[WorkerPods | ScorerPods]
) -> dict[str, Any]:
    namespace = {"namespace": options.namespace} if options.namespace else {}
    if options.has_ray:
        roles, own = [Role.LEARNER], ["base/ray", "rayjob.yaml"]
        more: dict[str, Any] = {"generatorOptions": {"disableNameSuffixHash": True}}  # a RayJob's would not follow
    else:
        has_scorers = any(isinstance(pods, ScorerPods) for pods in deployments)
        some = {Role.SCORER: has_scorers, Role.OBSERVER: bool(options.keda)}
        roles = [Role.LEARNER, Role.WORKER, *(role for role, is_there in some.items() if is_there)]
        own = ["base/learner", *(pods.place for pods in deployments)]
        more = {"patches": [{"path": "learner.yaml"}]}
    server = [*_login(Role.OBSERVER), *(f"{SECRETS}/{name}" for name in SERVER_FILES)]  # its probes are an observer's
    return {
        **KUSTOMIZATION,
        **namespace,
        "resources": ["base/network", "base/broker", *own],
        **more,
        "images": [_image(options.image)],
        "configMapGenerator": [
            {"name": "headway-run", "literals": [f"HEADWAY_RUN={recipe.run.name}"]},
            {"name": "headway-recipe", "files": ["recipe.yaml"]},
        ],
        "secretGenerator": [
            {"name": "headway-broker", "files": server},
            *({"name": f"headway-{role}", "files": _login(role)} for role in roles),
        ],
    }


def _login(role: Role) -> list[str]:
    """Return the files with which a role logs in, as a generator of Secrets names them."""
    return [f"password={SECRETS}/passwords/{role}", f"ca.crt={SECRETS}/tls.crt"]


def _image(image: str) -> dict[str, str]:
    """Return how kustomize says the image."""
    name, _, digest = image.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # the port of a registry
        repository, tag = name, ""
    how = {"digest": digest} if digest else {"newTag": tag} if tag else {}
    return {"name": IMAGE, "newName": repository, **how}


def _shipped(folder: Traversable, place: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file below the folder."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _shipped(entry, f"{place}/{entry.name}")
        else:
            yield f"{place}/{entry.name}", entry.read_text()


def _make_secrets(directory: Path) -> None:
    """Make the passwords, the server's users and its certificate. Passwords and a certificate that are there stay."""
    from headway.weightsync.transports.certificate import self_signed

    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)
    replace_file(directory / ".gitignore", b"*\n")
    credentials = Credentials(directory)
    credentials.make()
    replace_file(directory / "users.acl", "\n".join([*credentials.acl(is_for_7_0=False), ""]).encode())
    if not (directory / "tls.crt").exists():
        key, certificate = self_signed(BROKER_HOST, [BROKER_HOST])
        replace_file(directory / "tls.key", key)
        (directory / "tls.key").chmod(0o600)
        replace_file(directory / "tls.crt", certificate)


def _yaml(content: dict[str, Any]) -> str:
    return _HEADER + to_yaml(content)
