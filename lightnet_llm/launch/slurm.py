"""A batch script for Slurm: torchrun once on each node, a stop before the time limit, and the queue again."""

from __future__ import annotations

import shlex

from .job import AWAITED, TRAINING, Job, lines, wrapped

# A free port of the first node, where the batch script runs: one to which nothing answers.
PORT = """for MASTER_PORT in $(shuf -i 10000-31999 -n 50); do
    (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null || break
done"""


def directives(job: Job) -> dict[str, str | None]:
    """Options of sbatch, in their long form; None for those without a value."""
    launch = job.launch
    found: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(launch.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(launch.gpus_per_node),
    }
    optional = {
        "cpus-per-task": launch.cpus_per_node,
        "mem": None if launch.memory_gib is None else f"{launch.memory_gib}G",
        "time": launch.time,
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
    }
    found |= {name: str(value) for name, value in optional.items() if value is not None}
    if launch.cpus_per_node is None:  # a node's one task would be confined to one core
        found["exclusive"] = None
    if launch.time is not None and launch.grace_seconds:
        found["signal"] = f"B:TERM@{launch.grace_seconds}"
    return found | {"requeue": None, "open-mode": "append", "output": "%x-%j.log"}


def _container(job: Job) -> list[str]:
    launch = job.launch
    if launch.image is None:
        return []
    mounts = ",".join(f"{source}:{path}" for source, path in launch.volumes.items())
    place = next(iter(launch.volumes.values()), None)
    # Without volumes the container sees the folder the job was submitted from.
    return [
        f"--container-image={shlex.quote(launch.image)}",
        f"--container-mounts={shlex.quote(mounts)}" if mounts else '--container-mounts="$PWD:$PWD"',
        f"--container-workdir={shlex.quote(place)}" if place else '--container-workdir="$PWD"',
    ]


def _stop_folder(job: Job) -> str:
    """The run folder as the batch script, outside any container, sees it."""
    folder, launch = job.run_folder, job.launch
    if launch.image and launch.volumes:
        first, *_ = launch.volumes.values()
        inside = folder if folder.startswith("/") else f"{first.rstrip('/')}/{folder}"
        for source, path in sorted(launch.volumes.items(), key=lambda one: -len(one[1])):  # the innermost
            if inside.startswith(path.rstrip("/") + "/"):
                return source.rstrip("/") + inside[len(path.rstrip("/")) :]
    return folder


def emit(job: Job) -> str:
    """The script."""
    launch = job.launch
    name = f"{job.name}.sbatch"
    srun = ["srun --kill-on-bad-exit=1", *_container(job)]
    # Only the node's rank is left to the shell on the node; all else is one quoted word each.
    srun += ["""bash -c 'exec torchrun --node-rank="$SLURM_NODEID" "$@"' torchrun"""]
    srun += [f"--nnodes={launch.nodes} --nproc-per-node={launch.gpus_per_node}"]
    srun += ['--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"']
    srun += [f"-m {TRAINING}", *job.quoted()]
    text = [
        "#!/bin/bash",
        f"# {job.world} GPUs: {launch.nodes} node(s) with {launch.gpus_per_node} each. Written by",
        f"#   {job.written_by('slurm')}",
        f"# Submit it where data and runs are, on a file system that all nodes share: sbatch {name}",
        *(f"#SBATCH --{key}" + ("" if value is None else f"={value}") for key, value in directives(job).items()),
        "set -euo pipefail",
        *job.setup(),
        *job.exports(),
        "",
        'read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        PORT,
        "export MASTER_ADDR MASTER_PORT",
        "",
        "# Slurm sends SIGTERM here before the time limit. The ranks then save after the step they are in and exit 0; the",
        "# job goes back into the queue and resumes.",
        f"run={shlex.quote(_stop_folder(job))}",
        "stopped=",
        "stop() {",
        "    stopped=1 again=1  # the signal ends a wait, not the job",
        '    mkdir -p "$run" && echo "$SLURM_JOB_ID" > "$run/stop"',
        "}",
        "trap stop TERM",
        "",
        wrapped(srun) + " &",
        *AWAITED,
        'if [ -n "$stopped" ] && [ "$code" -eq 0 ] && [ ! -e "$run/finished.json" ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return lines(text)
