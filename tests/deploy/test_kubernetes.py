"""The manifests of `headway launch kubernetes`: their fields, their references, and the network paths that they allow.

No test has a cluster. `kubectl kustomize` renders the manifests, where it is installed.
"""

import json
import stat
from collections.abc import Iterator
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml

from headway.broker.connection.address import Address
from headway.broker.server.access import Role
from headway.deploy.cli.main import answer, cli
from headway.deploy.launch.kubernetes_manifests import AUTOSCALER_PORT, METRICS_PORT, PULL_PORTS
from headway.deploy.launch.process_pool import DRAIN_WORKER_S
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.autoscaler import Wanted
from headway.deploy.roles.standalone import _own_of

from .kubernetes_objects import (
    BASE,
    Object,
    Port,
    admits,
    check_schema,
    containers_of,
    headway_lines,
    launch,
    name_of,
    named,
    objects_in,
    pods_of,
    references,
    rendered,
    selects,
)

POOLS = "workers.pools=[{name: Big_1, count: 3, engine: {kind: vllm, options: {tensor_parallel_size: 2, model: $x}}}]"
CUDA = ("learner.processes=4", "learner.threads=2", "learner.device=cuda")
SCORED = (
    "rewards=[{kind: reward_model, path: org/reward}]",
    "teacher.path=org/teacher",
    "scorers={count: 2, device: cuda, threads: 3, engine: {kind: vllm, options: {load_format: $x}}}",
)
SCALED = ("--namespace", "rl", "--keda", "Big_1=8")
BROKER, LEARNER, WORKER = (
    {"app.kubernetes.io/name": "headway", "app.kubernetes.io/component": role}
    for role in ("broker", "learner", "worker")
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launched_once(tmp_path_factory: pytest.TempPathFactory, *arguments: str) -> list[Object]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("launched"))
        return rendered(launch(*arguments))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    image = ("--image", "registry.example:5000/headway:0.1.0")
    return launched_once(tmp_path_factory, POOLS, *SCORED, *CUDA, *image, *SCALED)


@pytest.fixture
def objects(launched: list[Object]) -> list[Object]:
    """Return objects of the test's own, which it may change."""
    return deepcopy(launched)


def patch(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def container_of(file: Path) -> Any:
    (container,) = patch(file)["spec"]["template"]["spec"]["containers"]
    return container


def test_the_files_are_those_that_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["launch", "kubernetes", "arithmetic.yaml", "--output", "x", "--json"]) == 0
    written = {Path(path) for path in json.loads(capsys.readouterr().out)["files"]}
    found = {path for path in (tmp_path / "x").rglob("*") if path.is_file() and "secrets" not in path.parts}
    assert written == found
    assert {path.relative_to(BASE) for path in BASE.rglob("*") if path.is_file()} == {
        path.relative_to(tmp_path / "x" / "base") for path in found if "base" in path.parts
    }


def test_a_dry_run_prints_the_files_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry = ["launch", "kubernetes", "arithmetic.yaml", "--output", "launch", "--dry-run"]
    assert answer([*dry, "--json"]) == 0
    texts = json.loads(capsys.readouterr().out)["files"]
    assert answer(dry) == 0
    printed = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    written = launch()
    assert texts == {name: (written / name).read_text() for name in texts}
    assert all(text.rstrip() in printed for text in texts.values())


def test_the_recipe_decides_numbers_and_devices() -> None:
    scripts = launch(POOLS, *CUDA, "--pool", "5")
    assert container_of(scripts / "learner.yaml")["resources"] == {
        "requests": {"cpu": "8"},
        "limits": {"nvidia.com/gpu": 4},
    }
    assert patch(scripts / "pools" / "workers" / "workers.yaml")["spec"]["replicas"] == 5
    assert "limits" not in container_of(scripts / "pools" / "workers" / "workers.yaml")["resources"]
    big = scripts / "pools" / "big-1" / "workers.yaml"
    assert patch(big)["spec"]["replicas"] == 3
    assert container_of(big)["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert 'engine.options={"tensor_parallel_size": 2, "model": "$$x"}' in container_of(big)["args"]  # $$ stands for $


def test_the_learners_recipe_has_the_ports_and_the_place_that_pods_have() -> None:
    sinks = "metrics=[{kind: jsonl}, {kind: prometheus, options: {port: 1}}]"
    scripts = launch(sinks, "run.directory=/elsewhere", "weights.ports=[1,2]")
    recipe = load_recipe(scripts / "recipe.yaml")
    assert recipe.run.directory == "runs"
    assert recipe.weights.ports == PULL_PORTS
    assert [sink.kind for sink in recipe.metrics] == ["jsonl", "prometheus"]
    assert recipe.metrics[1].options == {"host": "0.0.0.0", "port": METRICS_PORT}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pool", "small=2"], "The recipe has no pool 'small', only workers."),
        (["broker.url='redis://h:1'"], "`headway launch kubernetes` starts a server of its own: leave broker.url out."),
        (["run.placement=colocated"], "On Kubernetes learner and workers are pods of their own"),
        (["workers.pools=[{name: a.b, count: 1}, {name: a_b, count: 1}]"], "pools a.b and a_b are the same"),
        (["--image", "Not an image"], "--image 'Not an image' is no image"),
        (["--namespace", "My_space"], "--namespace 'My_space' must be lower-case letters, digits and dashes."),
        (["--keda", "4"], "KEDA asks from another namespace: name this run's own with --namespace."),
        (["--keda", "small=2", "--namespace", "rl"], "The recipe has no pool 'small', only workers."),
        (
            [
                "rewards=[{kind: reward_model, path: 'stage:rm'}]",
                "stages=[{kind: reward_model, name: rm, options: {data: {path: x.jsonl}}}, {kind: rl}]",
            ],
            "rewards[0].path is stage:rm, which an earlier stage leaves on the volume of the learner's pod",
        ),
        (["--ray", "--keda", "4"], "With --ray, Ray places the workers: leave --keda out."),
        (["learner.step=3"], "unknown key learner.step"),
    ],
)
def test_what_cannot_run_on_a_cluster_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["launch", "kubernetes", "arithmetic.yaml", *arguments, "--output", "x"]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_passwords_are_files_for_their_owner_alone_and_in_no_manifest() -> None:
    scripts = launch()
    secrets = scripts / "secrets"
    private = [*(secrets / "passwords" / role for role in Role), secrets / "tls.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    texts = "".join(path.read_text() for path in scripts.rglob("*") if path.is_file() and path not in private)
    assert len(texts) > 1000
    assert not [path for path in private if path.read_text().strip() in texts]
    users = (secrets / "users.acl").read_text()
    assert users.startswith("user default off\n")
    assert all(sha256((secrets / "passwords" / role).read_bytes().strip()).hexdigest() in users for role in Role)


def test_a_second_launch_keeps_passwords_and_certificate() -> None:
    secrets = launch() / "secrets"
    before = {path.name: path.read_bytes() for path in secrets.rglob("*") if path.is_file()}
    launch("learner.steps=3")
    assert before == {path.name: path.read_bytes() for path in secrets.rglob("*") if path.is_file()}


@pytest.mark.parametrize("one", list(objects_in(BASE)), ids=name_of)
def test_a_shipped_object_has_only_fields_of_its_kind(one: Object) -> None:
    check_schema(one)


def test_all_that_reaches_the_cluster_has_only_fields_of_its_kind(objects: list[Object]) -> None:
    assert len(objects) > 15
    for one in objects:
        check_schema(one)
        assert one["metadata"]["namespace"] == "rl"


def test_every_name_that_a_pod_needs_exists(objects: list[Object]) -> None:
    exist = {name_of(one) for one in objects}
    needed = {name for pod in pods_of(objects).values() for name in references(pod)}
    assert len(needed) == 8
    assert needed <= exist
    services = {one["spec"]["serviceName"] for one in objects if one["kind"] == "StatefulSet"}
    hosts = {Address.parse(url).url.split("@")[1].split(":")[0] for url in urls(objects)}
    assert {f"Service/{name}" for name in (services | hosts)} <= exist


def urls(objects: list[Object]) -> Iterator[str]:
    """Yield the URLs of the broker in the pods' environment, without the files that exist only in a pod."""
    for pod in pods_of(objects).values():
        for container in containers_of(pod):
            for variable in container.get("env", []):
                if variable["name"] == "HEADWAY_BROKER":
                    assert variable["value"].startswith("rediss://headway-")
                    yield variable["value"].partition("?")[0]


def test_every_file_that_a_pod_names_is_mounted(objects: list[Object]) -> None:
    for pod in pods_of(objects).values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        (container,) = containers_of(pod)
        text = json.dumps([container.get("command"), container.get("args"), container.get("env")])
        for mount in container["volumeMounts"]:
            secret = volumes.get(mount["name"], {}).get("secret")
            if secret is None:
                continue
            keys = named(objects, f"Secret/{secret['secretName']}")["data"]
            named_files = {part.split("&")[0] for part in text.split(mount["mountPath"] + "/")[1:]}
            named_files = {name.replace('"', " ").split()[0].strip("\\)") for name in named_files}
            assert named_files
            assert named_files <= set(keys)


def test_selectors_match_the_pods_that_they_are_for(objects: list[Object]) -> None:
    pods = {name: pod["metadata"]["labels"] for name, pod in pods_of(objects).items()}
    for one in objects:
        spec, kind = one.get("spec", {}), one["kind"]
        if kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            matched = [name for name, labels in pods.items() if selects(spec["selector"], labels)]
            assert [name.partition("/")[2] for name in matched] == [one["metadata"]["name"]]
        if kind == "Service":
            owner = "Deployment" if "autoscaler" in one["metadata"]["name"] else "StatefulSet"
            matched = [name for name, labels in pods.items() if selects({"matchLabels": spec["selector"]}, labels)]
            assert matched == [f"{owner}/{one['metadata']['name']}"]
            ports = {port["name"] for port in containers_of(pods_of(objects)[matched[0]])[0]["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= ports


def test_only_roles_reach_the_broker_and_weights_go_between_learner_and_workers(objects: list[Object]) -> None:
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    pods = pods_of(objects)
    big = pods["Deployment/headway-workers-big-1"]["metadata"]["labels"]
    main = pods["Deployment/headway-workers"]["metadata"]["labels"]
    learner = pods["StatefulSet/headway-learner"]["metadata"]["labels"]
    broker = Port(pods["StatefulSet/headway-broker"]["metadata"]["labels"], 6379)
    roles = (learner, main, big)
    assert all(admits(policies, broker, labels=role) for role in roles)
    assert not admits(policies, broker, labels={"app": "stranger"})
    assert not admits(policies, broker, labels={}, namespace="monitoring")
    assert all(admits(policies, Port(learner, port), labels=role) for port in PULL_PORTS for role in (main, big))
    broadcast = [Port(to, port) for to in roles for port in (32768, 60999)]  # the system's own choice of ports
    for to in broadcast:
        assert all(admits(policies, to, labels=role) for role in roles if role != to.labels or role != learner)
        assert not admits(policies, to, labels={"app": "stranger"})
    for role in roles:
        assert admits(policies, Port(role, METRICS_PORT), labels={}, namespace="monitoring")
        assert not admits(policies, Port(role, METRICS_PORT), labels={}, namespace="other")
    assert [one["spec"]["egress"] for one in policies if "egress" in one["spec"]] == [[]]


def test_a_scorer_has_its_own_number_gpu_and_secret_and_reaches_the_broker_alone(objects: list[Object]) -> None:
    policies, pods = [one for one in objects if one["kind"] == "NetworkPolicy"], pods_of(objects)
    broker = pods["StatefulSet/headway-broker"]["metadata"]["labels"]
    others = [pod["metadata"]["labels"] for name, pod in pods.items() if "scorers" not in name]
    names = {"reward-model": "reward_model", "teacher": "teacher"}
    assert {f"Deployment/headway-scorers-{label}" for label in names} == {name for name in pods if "scorers" in name}
    for label, name in names.items():
        deployment = named(objects, f"Deployment/headway-scorers-{label}")
        pod = pods[f"Deployment/headway-scorers-{label}"]
        (container,) = containers_of(pod)
        assert deployment["spec"]["replicas"] == 2
        assert container["args"] == [f"--scorer={name}", 'scorers.engine.options.load_format="$$x"']
        assert container["resources"]["requests"]["cpu"] == "3"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
        secrets = [one["secret"]["secretName"] for one in pod["spec"]["volumes"] if "secret" in one]
        assert [one.startswith("headway-scorer") for one in secrets] == [True]
        labels = pod["metadata"]["labels"]
        assert admits(policies, Port(broker, 6379), labels=labels)
        assert not any(admits(policies, Port(labels, 32768), labels=one) for one in others)
    assert not list((launch("teacher.path=org/t", "scorers.count=0") / "scorers").glob("*"))


def test_probes_and_ports_are_those_that_the_roles_serve(objects: list[Object]) -> None:
    for name, pod in pods_of(objects).items():
        (container,) = containers_of(pod)
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for probe in (value for key, value in container.items() if key.endswith("Probe")):
            if "httpGet" in probe:
                assert probe["httpGet"] in ({"path": "/metrics", "port": "metrics"}, {"path": "/", "port": "http"})
                assert ports in ({"metrics": METRICS_PORT}, {"http": AUTOSCALER_PORT})
        if name.startswith("Deployment/headway-workers"):
            assert f"workers.metrics_port={METRICS_PORT}" in container["args"]
            assert "workers.metrics_host=0.0.0.0" in container["args"]


def test_pods_have_no_rights_that_they_do_not_need(objects: list[Object]) -> None:
    for pod in pods_of(objects).values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in containers_of(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_a_worker_is_killed_by_its_supervisor_before_kubernetes_kills_the_pod(objects: list[Object]) -> None:
    pod = pods_of(objects)["Deployment/headway-workers"]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= DRAIN_WORKER_S + 10


def test_image_and_run_stand_in_one_place(objects: list[Object]) -> None:
    images = {container["image"] for pod in pods_of(objects).values() for container in containers_of(pod)}
    assert images == {"registry.example:5000/headway:0.1.0", "valkey/valkey:8.1"}
    (run,) = [one for one in objects if name_of(one).startswith("ConfigMap/headway-run")]
    assert run["data"] == {"HEADWAY_RUN": "arithmetic"}


@pytest.mark.parametrize(
    ("image", "entry"),
    [
        ("headway", {"newName": "headway"}),
        ("host:5000/a/headway", {"newName": "host:5000/a/headway"}),
        ("a/headway:1.2", {"newName": "a/headway", "newTag": "1.2"}),
        (f"a/headway@sha256:{'0' * 64}", {"newName": "a/headway", "digest": f"sha256:{'0' * 64}"}),
    ],
)
def test_an_image_may_have_a_tag_or_a_digest(image: str, entry: dict[str, str]) -> None:
    (found,) = patch(launch("--image", image) / "kustomization.yaml")["images"]
    assert found == {"name": "headway", **entry}


def test_every_headway_command_of_a_container_is_one_that_the_command_line_takes(objects: list[Object]) -> None:
    lines = [line for pod in pods_of(objects).values() for line in lines_of(pod, objects)]
    assert sorted({line[0] for line in lines}) == [
        "autoscale",
        "broker",
        "learner",
        "scorers",
        "workers",
    ]
    for line in lines:
        check_line(line)
    with pytest.raises(click.UsageError, match="--poll"):
        check_line(["workers", "--poll", "x"])


def lines_of(pod: Object, objects: list[Object]) -> list[list[str]]:
    scripts = {
        name: text
        for one in objects
        if one["kind"] == "ConfigMap"
        for name, text in one["data"].items()
        if "sh" in name
    }
    return [line for container in containers_of(pod) for line in headway_lines(container, scripts)]


def check_line(line: list[str]) -> None:
    """Raise UsageError for an unknown option, and ConfigError for what a worker cannot choose."""
    words = [word for word in line[1:] if word != '"${resume[@]}"']
    connection = [] if line[0] == "broker" else ["--broker", "redis://host", "--run", "first"]
    context = cli.commands[line[0]].make_context("headway", [*words, *connection])
    if line[0] == "workers":
        _own_of(context.params["overrides"])


def test_keda_asks_the_autoscaler_of_a_pool_and_scales_its_workers(objects: list[Object]) -> None:
    (scaled,) = [one for one in objects if one["kind"] == "ScaledObject"]
    spec = scaled["spec"]
    assert spec["maxReplicaCount"] == 8
    workers = named(objects, f"Deployment/{spec['scaleTargetRef']['name']}")
    assert "replicas" not in workers["spec"]  # KEDA's alone
    url = urlsplit(spec["triggers"][0]["metadata"]["url"])
    service, namespace, _ = (url.hostname or "").split(".")
    found = named(objects, f"Service/{service}")
    assert namespace == found["metadata"]["namespace"]
    assert url.port == found["spec"]["ports"][0]["port"] == AUTOSCALER_PORT
    autoscaler = pods_of(objects)["Deployment/headway-autoscaler-big-1"]
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    port = Port(autoscaler["metadata"]["labels"], AUTOSCALER_PORT)
    assert admits(policies, port, labels={}, namespace="keda")
    assert not admits(policies, port, labels={}, namespace="other")
    broker = pods_of(objects)["StatefulSet/headway-broker"]["metadata"]["labels"]
    assert admits(policies, Port(broker, 6379), labels=autoscaler["metadata"]["labels"])


def test_the_value_that_keda_reads_is_one_that_the_autoscaler_serves(objects: list[Object]) -> None:
    (scaled,) = [one for one in objects if one["kind"] == "ScaledObject"]
    metadata = scaled["spec"]["triggers"][0]["metadata"]
    assert metadata["valueLocation"] in Wanted.__struct_fields__
    assert float(metadata["targetValue"]) == 1  # so the number of pods is the value
    (line,) = lines_of(pods_of(objects)["Deployment/headway-autoscaler-big-1"], objects)
    (worker,) = lines_of(pods_of(objects)["Deployment/headway-workers-big-1"], objects)
    pool = next(word for word in line if word.startswith("--pool"))
    assert f"{pool}.$(POD_NAME)" in worker


@pytest.fixture(scope="module")
def launched_on_ray(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    return launched_once(tmp_path_factory, POOLS, *CUDA, "--pool", "5", "--ray", "--image", "a/headway:1")


@pytest.fixture
def ray_objects(launched_on_ray: list[Object]) -> list[Object]:
    """Return objects of the test's own, which it may change."""
    return deepcopy(launched_on_ray)


def test_a_rayjob_and_all_beside_it_have_only_fields_of_their_kinds(ray_objects: list[Object]) -> None:
    for one in ray_objects:
        check_schema(one)
    assert {one["kind"] for one in ray_objects} >= {"RayJob", "PersistentVolumeClaim", "StatefulSet"}
    assert not [one for one in ray_objects if "learner" in name_of(one) and one["kind"] == "StatefulSet"]


def test_a_ray_cluster_has_room_for_the_learner_and_for_each_worker(ray_objects: list[Object]) -> None:
    cluster = named(ray_objects, "RayJob/headway")["spec"]["rayClusterSpec"]

    def limits(group: Object) -> Object:
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "a/headway:1"
        return dict(container["resources"]["limits"])

    assert limits(cluster["headGroupSpec"]) == {"cpu": "8", "nvidia.com/gpu": 4}
    groups = {group["groupName"]: (group["replicas"], limits(group)) for group in cluster["workerGroupSpecs"]}
    assert groups == {"workers": (5, {"cpu": "1"}), "big-1": (3, {"cpu": "1", "nvidia.com/gpu": 2})}


def test_every_name_that_a_ray_pod_needs_exists_and_ray_pods_reach_the_broker(ray_objects: list[Object]) -> None:
    exist = {name_of(one) for one in ray_objects}
    pods = pods_of(ray_objects)
    assert {name for pod in pods.values() for name in references(pod)} <= exist
    policies = [one for one in ray_objects if one["kind"] == "NetworkPolicy"]
    broker = Port(pods["StatefulSet/headway-broker"]["metadata"]["labels"], 6379)
    labels = pods["RayJob/headway/head"]["metadata"]["labels"]
    assert admits(policies, broker, labels=labels)
    assert admits(policies, Port(labels, 6379), labels=labels)
    dashboard = Port(labels, 8265)  # a client that reaches it can run code
    assert admits(policies, dashboard, labels={}, namespace="kuberay-system")
    assert not admits(policies, dashboard, labels={"app": "stranger"})
    assert not admits(policies, dashboard, labels={}, namespace="monitoring")


def test_a_ray_job_reads_the_brokers_address_from_the_recipe(ray_objects: list[Object]) -> None:
    text = named(ray_objects, "ConfigMap/headway-recipe")["data"]["recipe.yaml"]
    url = yaml.safe_load(text)["broker"]["url"]
    where, _, options = url.partition("?")
    assert where == "rediss://headway-learner@headway-broker:6379"
    keys = named(ray_objects, "Secret/headway-learner")["data"]
    assert {option.rpartition("/")[2] for option in options.split("&")} == set(keys)
    pods = pods_of(ray_objects)
    for name in ("RayJob/headway/head", "RayJob/headway/workers", "RayJob/headway/big-1"):
        (container,) = containers_of(pods[name])
        assert {"name": "broker", "mountPath": "/etc/headway/broker", "readOnly": True} in container["volumeMounts"]
