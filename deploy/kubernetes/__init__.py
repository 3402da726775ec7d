"""The manifests that `headway launch kubernetes` copies; `deploy/launch/kubernetes.py` adds a run's own files.

    base/broker/    Valkey: a StatefulSet with its data on a volume
    base/learner/   the learner: a StatefulSet with the run's directory on a volume; learner.sh resumes a run
    base/workers/   a pool of workers: a Deployment, of which each pod is one worker
    base/scorers/   a reward model or a teacher: a Deployment, of which each pod is one process that scores
    base/autoscaler/   `headway autoscale --serve` for a pool, which KEDA asks
    base/ray/       a RayJob of KubeRay in place of learner and workers, which runs `headway ray up`
    base/network/   who may reach whom

Each role has its service and its disruption budget beside it. The invariant: no manifest contains a password, a
recipe or the name of a run. Kustomize makes Secrets and ConfigMaps of files of the launch directory.
"""
