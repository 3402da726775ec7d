"""The Deployments of a run on Kubernetes, as the files that build on `deploy/kubernetes/base`: pools of workers, and
scorers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.deploy.recipe.pools import MAIN

from .base import Resources

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
