"""The objects that a launch directory asks a cluster for, and a reading of them as a cluster's."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
import pytest
import yaml

from headway.deploy.cli.main import answer

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
VERSION = "1.37"
Object = dict[str, Any]


def launch(*arguments: str) -> Path:
    """Write a launch directory below the working directory, and return it."""
    assert answer(["launch", "kubernetes", "arithmetic.yaml", *arguments, "--output", "launch"]) == 0
    return Path.cwd() / "launch"


def closed(*required: str, **fields: Any) -> Object:
    """Return a JSON schema of an object with these fields and no other."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


NUMBER, TEXT, TEXTS = {"type": "integer", "minimum": 0}, {"type": "string"}, {"type": "object"}
METADATA = closed("name", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
SCALED_OBJECT = closed(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind=TEXT,
    metadata=METADATA,
    spec=closed(
        "scaleTargetRef",
        "triggers",
        scaleTargetRef=closed("name", name=TEXT, kind=TEXT, apiVersion=TEXT),
        pollingInterval=NUMBER,
        cooldownPeriod=NUMBER,
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        advanced=closed(
            horizontalPodAutoscalerConfig=closed(behavior=closed(scaleDown=closed(stabilizationWindowSeconds=NUMBER)))
        ),
        triggers={
            "type": "array",
            "minItems": 1,
            "items": closed(
                "type",
                "metadata",
                type={"const": "metrics-api"},
                metricType={"enum": ["AverageValue", "Value"]},
                metadata=closed("url", "valueLocation", "targetValue", url=TEXT, valueLocation=TEXT, targetValue=TEXT),
            ),
        },
    ),
)
"""The fields of KEDA's ScaledObject that the manifests use, as KEDA's documentation describes them."""
PARAMETERS = {"type": "object", "additionalProperties": TEXT}
POD = {"type": "object"}  # see `check_schema`
RAY_JOB = closed(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "ray.io/v1"},
    kind=TEXT,
    metadata=METADATA,
    spec=closed(
        "entrypoint",
        "rayClusterSpec",
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
        backoffLimit=NUMBER,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=NUMBER,
        rayClusterSpec=closed(
            "headGroupSpec",
            headGroupSpec=closed("template", rayStartParams=PARAMETERS, template=POD),
            workerGroupSpecs={
                "type": "array",
                "items": closed(
                    "groupName",
                    "template",
                    groupName=TEXT,
                    replicas=NUMBER,
                    minReplicas=NUMBER,
                    maxReplicas=NUMBER,
                    rayStartParams=PARAMETERS,
                    template=POD,
                ),
            },
        ),
    ),
)
"""The fields of KubeRay's RayJob that the manifests use."""
CUSTOM = {"ScaledObject": SCALED_OBJECT, "RayJob": RAY_JOB}


class Port(NamedTuple):
    """A port of pods with these labels."""

    labels: Mapping[str, str]
    number: int


def rendered(directory: Path) -> list[Object]:
    """Return the objects that `kubectl apply -k` would send; skip the test where kubectl is missing."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "Warning" not in made.stderr
    return list(yaml.safe_load_all(made.stdout))


def objects_in(directory: Path) -> Iterator[Object]:
    """Yield the objects of all manifests below the directory, as they are written."""
    for path in sorted(directory.rglob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text())


def check_schema(one: Object) -> None:
    """Raise ValidationError for a field that this kind does not have, and for a value of a wrong type."""
    schema = CUSTOM.get(one["kind"])
    if schema is not None:
        jsonschema.validate(one, schema)
        for pod in pods_of([one]).values():
            check_schema({"apiVersion": "v1", "kind": "Pod", **pod})
        return
    kubernetes_validate.validate(one, VERSION, strict=True)


def name_of(one: Object) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def named(objects: Sequence[Object], name: str) -> Object:
    """Return the object of that kind and name, such as Deployment/headway-workers."""
    (found,) = [one for one in objects if name_of(one) == name]
    return found


def pods_of(objects: Sequence[Object]) -> dict[str, Object]:
    """Return the template of each object that makes pods, by the object's name."""
    found = {name_of(one): one["spec"]["template"] for one in objects if "template" in one.get("spec", {})}
    for one in objects:
        if one["kind"] == "RayJob":
            cluster = one["spec"]["rayClusterSpec"]
            groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
            groups["head"] = cluster["headGroupSpec"]
            found |= {f"{name_of(one)}/{name}": group["template"] for name, group in groups.items()}
    return found


def containers_of(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def references(pod: Object) -> Iterator[str]:
    """Yield the Secrets and ConfigMaps without which the pod would not start."""
    for volume in pod["spec"].get("volumes", []):
        if "secret" in volume:
            yield f"Secret/{volume['secret']['secretName']}"
        if "configMap" in volume:
            yield f"ConfigMap/{volume['configMap']['name']}"
        if "persistentVolumeClaim" in volume:
            yield f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}"
    for container in containers_of(pod):
        for source in container.get("envFrom", []):
            yield from (f"{kind[0].upper()}{kind[1:-3]}/{ref['name']}" for kind, ref in source.items())


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def admits(policies: Sequence[Object], to: Port, *, labels: Mapping[str, str], namespace: str = "") -> bool:
    """Whether network policies let a pod with these labels reach a port; `namespace` is that of the pod, if another."""
    about = [one["spec"] for one in policies if selects(one["spec"]["podSelector"], to.labels)]
    rules = [rule for spec in about if "Ingress" in spec["policyTypes"] for rule in spec.get("ingress", [])]
    return not about or any(
        any(_is_peer(peer, labels, namespace) for peer in rule["from"])
        and any(port["port"] <= to.number <= port.get("endPort", port["port"]) for port in rule["ports"])
        for rule in rules
    )


def _is_peer(peer: Object, labels: Mapping[str, str], namespace: str) -> bool:
    if "namespaceSelector" in peer:
        return selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    return not namespace and selects(peer["podSelector"], labels)


def headway_lines(container: Object, scripts: Mapping[str, str]) -> list[list[str]]:
    """Return the command lines of `headway` that the container starts, by itself or in a script of `scripts`."""
    words = [*container.get("command", []), *container.get("args", [])]
    if words[0] == "headway":
        return [[word.replace("$$", "$") for word in words[1:]]]
    text = "".join(scripts[Path(word).name] for word in words if Path(word).name in scripts)
    return [line.split() for line in re.findall(r"\bheadway ([^;&|\n]+)", text)]
