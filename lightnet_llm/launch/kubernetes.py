"""An indexed Job of Kubernetes, one pod a host, and the headless Service by which the pods find the first."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from ..checkpoint.store import LATEST, step_name
from ..training.failures import STOPPED
from .job import AWAITED, TRAINING, Job

PORT = 29500  # pods have an address of their own, so nothing else is there
IMAGE = "lightnet:latest"
CLAIM = {"lightnet": "/lightnet"}
FOLDER = "/etc/lightnet"


def name_of(run: str) -> str:
    """A DNS label (RFC 1123) from a run's name, short enough for the pods' numbers."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:50].rstrip("-") or "lightnet"


def _literal(text: str) -> str:
    """Kubernetes reads $(NAME) in arguments and values, and $$ as one $."""
    return text.replace("$", "$$")


def _script(job: Job) -> str:
    """What a pod runs: torchrun, a stop when the pod is removed, and the exit code that says whether the Job goes on."""
    at = job.config.train.stop_at_step
    text = [
        *map(_literal, job.launch.setup or []),
        f"run={_literal(shlex.quote(job.run_folder))}",
        "# SIGTERM comes here before the pod is removed. All pods then save after the step they are in.",
        "stop() {",
        "    again=1  # the signal ends a wait, not torchrun",
        '    mkdir -p "$run" && echo removed > "$run/stop"',
        "}",
        "trap stop TERM",
        'torchrun --node-rank="$JOB_COMPLETION_INDEX" "$@" &',
        *AWAITED,
        "# 0 would complete this pod's part of the Job, which goes on until the training is finished.",
        'if [ "$code" -eq 0 ] && [ ! -e "$run/finished.json" ]; then',
        f"    code={STOPPED}",
    ]
    if at is not None:  # names of checkpoints are as long as each other, so they sort by step
        text += [
            f'    read -r saved < "$run/checkpoints/{LATEST}"',
            f'    [[ "$saved" < {step_name(at)} ]] || code=0  # train.stop_at_step',
        ]
    return "\n".join([*text, "fi", 'exit "$code"'])


def _container(job: Job, name: str, volumes: dict[str, str]) -> dict[str, Any]:
    launch = job.launch
    training = job.training(None if job.is_preset else f"{FOLDER}/{job.name}.yaml")
    rendezvous = ["--standalone"] if launch.nodes == 1 else [f"--master-addr={name}-0.{name}", f"--master-port={PORT}"]
    arguments = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.gpus_per_node}", *rendezvous]
    arguments += ["-m", TRAINING, *map(_literal, training)]
    resources: dict[str, Any] = {"limits": {"nvidia.com/gpu": launch.gpus_per_node}}
    asked = {
        "cpu": None if launch.cpus_per_node is None else str(launch.cpus_per_node),
        "memory": None if launch.memory_gib is None else f"{launch.memory_gib}Gi",
    }
    if any(asked.values()):
        resources["requests"] = {key: value for key, value in asked.items() if value is not None}
    container: dict[str, Any] = {
        "name": "train",
        "image": launch.image or IMAGE,
        "workingDir": next(iter(volumes.values())),
        "command": ["bash", "-c", _script(job), "torchrun"],
        "args": arguments,
        "resources": resources,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if launch.environment:
        container["env"] = [{"name": key, "value": _literal(value)} for key, value in launch.environment.items()]
    if launch.secret:
        container["envFrom"] = [{"secretRef": {"name": launch.secret}}]
    return container


def documents(job: Job) -> list[dict[str, Any]]:
    """The objects to create, in order."""
    launch, name = job.launch, name_of(job.name)
    meta: dict[str, Any] = {"name": name, "labels": {"app": name}}
    if launch.namespace:
        meta["namespace"] = launch.namespace
    volumes = launch.volumes or CLAIM
    container = _container(job, name, volumes)
    pod_volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{launch.shared_memory_gib}Gi"}}
    ]
    for index, (source, path) in enumerate(volumes.items()):
        kind = {"hostPath": {"path": source}} if "/" in source else {"persistentVolumeClaim": {"claimName": source}}
        pod_volumes.append({"name": f"volume-{index}", **kind})
        container["volumeMounts"].append({"name": f"volume-{index}", "mountPath": path})
    found: list[dict[str, Any]] = []
    if not job.is_preset:
        found.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {f"{job.name}.yaml": job.resolved()}}
        )
        pod_volumes.append({"name": "config", "configMap": {"name": name}})
        container["volumeMounts"].append({"name": "config", "mountPath": FOLDER})
    selector = {"batch.kubernetes.io/job-name": name}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    found.append({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service})
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",  # the Job makes another pod; a podFailurePolicy wants it so
        "terminationGracePeriodSeconds": launch.grace_seconds,
        "containers": [container],
        "volumes": pod_volumes,
    }
    removed = {"type": "DisruptionTarget", "status": "True"}
    stopped = {"containerName": container["name"], "operator": "In", "values": [STOPPED]}
    spec = {
        "completions": launch.nodes,
        "parallelism": launch.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 6 * launch.nodes,  # a lost pod ends the others, and all start again and resume
        # A pod that was drained, preempted or lost with its node, and one that saved and stopped with it, are no failures.
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [removed]},
                {"action": "Ignore", "onExitCodes": stopped},
            ]
        },
        "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
    }
    return [*found, {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}]


class _Dumper(yaml.SafeDumper):
    """Repeats objects in full, without anchors; texts of several lines stand as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def emit(job: Job) -> str:
    """The file for ``kubectl apply -f``."""
    launch = job.launch
    head = [
        f"# {job.world} GPUs: {launch.nodes} pod(s) with {launch.gpus_per_node} each. Written by",
        f"#   {job.written_by('kubernetes')}",
        f"# kubectl apply -f {job.name}.kubernetes.yaml; relative paths start in the first volume.",
    ]
    body = yaml.dump_all(documents(job), Dumper=_Dumper, sort_keys=False, width=120)
    return "\n".join(head) + "\n" + body
