"""Shell scripts for torchrun and for the deepspeed launcher."""

from __future__ import annotations

import shlex

from .job import TRAINING, Job, lines, wrapped

PORT = "${MASTER_PORT:-29500}"


def _head(job: Job, kind: str, usage: list[str]) -> list[str]:
    launch = job.launch
    return [
        "#!/bin/bash",
        f"# {job.world} GPUs: {launch.nodes} host(s) with {launch.gpus_per_node} each. Written by",
        f"#   {job.written_by(kind)}",
        *(f"# {line}" for line in usage),
        "set -euo pipefail",
    ]


def torchrun(job: Job) -> str:
    """A script to be started on every host."""
    launch, name = job.launch, f"{job.name}.torchrun.sh"
    where = "where data and runs are"
    training = [f"-m {TRAINING}", *job.quoted()]
    if launch.nodes == 1:
        usage = [f"Start it {where}: bash {name}"]
        words = [f"exec torchrun --standalone --nproc-per-node={launch.gpus_per_node}", *training]
        return lines([*_head(job, "torchrun", usage), *job.setup(), *job.exports(), wrapped(words)])
    first = _first_host(job)
    usage = [
        f"Start it on every host, {where} (a file system that all share): bash {name} HOST_NUMBER"
        + (f" [FIRST_HOST, {first}]" if first else " FIRST_HOST"),
        f"HOST_NUMBER counts from 0 to {launch.nodes - 1}, FIRST_HOST is the name or address of number 0; MASTER_PORT must",
        "be free there and the same for all (default 29500).",
    ]
    said = f"usage: bash {name} HOST_NUMBER FIRST_HOST"
    arguments = [f'rank=${{1:?"{said}"}}', f"master=${{2:{f'-{first}' if first else f'?{chr(34)}{said}{chr(34)}'}}}"]
    words = [
        f"exec torchrun --nnodes={launch.nodes} --nproc-per-node={launch.gpus_per_node}",
        f'--node-rank="$rank" --master-addr="$master" --master-port="{PORT}"',
        *training,
    ]
    return lines([*_head(job, "torchrun", usage), *arguments, *job.setup(), *job.exports(), wrapped(words)])


def _first_host(job: Job) -> str | None:
    if job.hostfile is None:
        return None
    from .hosts import read_hostfile

    return next(iter(read_hostfile(job.hostfile)))


def deepspeed(job: Job) -> str:
    """A script that starts all hosts through pdsh and ssh, or with a host's number this one alone."""
    launch, name = job.launch, f"{job.name}.deepspeed.sh"
    config, overrides = shlex.quote(job.source), list(map(shlex.quote, job.overrides))
    if launch.nodes == 1:
        usage = [f"Start it where data and runs are: bash {name}"]
        words = [f"exec lightnet train {config}", *overrides, f"--gpus {launch.gpus_per_node}"]
        return lines([*_head(job, "deepspeed", usage), *job.setup(), *job.exports(), wrapped(words)])
    usage = [
        f"HOSTFILE has {launch.nodes} lines 'host slots={launch.gpus_per_node}'. Data, runs and this folder lie on a file",
        "system that all hosts share.",
        f"Start it on one host, which reaches the others by ssh without a password: bash {name} HOSTFILE",
        f"or on every host by itself, without ssh: bash {name} HOSTFILE HOST_NUMBER FIRST_HOST",
        "(MASTER_PORT must then be free on the first host and the same for all; default 29500).",
    ]
    given = f"-{shlex.quote(str(job.hostfile))}" if job.hostfile else f'?"usage: bash {name} HOSTFILE"'
    through_ssh = [f"exec lightnet train {config}", *overrides, '--hostfile "$hostfile"']
    alone = [
        'exec deepspeed --hostfile "$hostfile" --no_ssh --node_rank "$2"',
        f'--master_addr "${{3:?"FIRST_HOST is missing"}}" --master_port "{PORT}"',
        f"--module {TRAINING} --config {config}",
        *overrides,
    ]
    text = [
        *_head(job, "deepspeed", usage),
        f"hostfile=${{1:{given}}}",
        *job.setup(),
        *job.exports(),
        "if [ $# -lt 2 ]; then",
        "    " + wrapped(through_ssh, " " * 8),
        "fi",
        # A missing file would make the launcher start on this host alone, without a word.
        '[ -r "$hostfile" ] || { echo "error: hostfile $hostfile cannot be read" >&2; exit 1; }',
        wrapped(alone),
    ]
    return lines(text)
