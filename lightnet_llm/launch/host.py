"""What runs on each host of a multi-node run: ``python -m lightnet_llm.launch.host HANDOVER HOST``.

The handover is a file in the run folder that carries working directory, environment and command as JSON. DeepSpeed's own
way to other hosts, ``export NAME="value";`` in front of a command that pdsh and a remote shell read, changes values
with ``$``, quotes, backslashes or ``%`` and takes only NCCL and Python variables along. This module needs the standard library
alone.

It ends everything it started when the host of another rank failed (which it learns from a file that the handover names, since
pdsh waits for all hosts), and when its parent goes away, since sshd leaves a command running whose connection is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# These belong to the host or are set by the launcher there; everything else is taken along.
OWN = {
    "HOME",
    "HOSTNAME",
    "HOSTTYPE",
    "LOGNAME",
    "MAIL",
    "OLDPWD",
    "PWD",
    "SHELL",
    "SHLVL",
    "TERM",
    "USER",
    "DISPLAY",
    "_",
}
OWN |= {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
OWN |= {"CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "CUDA_VISIBLE_DEVICES"}
OWN_PREFIXES = ("SSH_", "XDG_", "DBUS_", "TORCHELASTIC_")
RANK = "{rank}"
GRACE = 10.0  # seconds for ranks that are ending by themselves, to write what they know
FAILED = "failed_host"


def travels(name: str) -> bool:
    """Whether a variable is passed on to the other hosts."""
    return name not in OWN and not name.startswith(OWN_PREFIXES)


def write_handover(
    path: Path, command: list[str], hosts: dict[str, int], environment: dict[str, str], failed: Path
) -> None:
    """Write what the hosts need; only the owner can read the file, since an environment may hold secrets.

    Args:
        path: file on a file system that all hosts share.
        command: what each host runs; an element ``{rank}`` becomes the host's index.
        hosts: slots by name.
        environment: variables; those that belong to a host or a rank stay behind.
        failed: file of this one start, by which its first host that fails ends the others. No other start may have it: a
            run folder may see two at a time, of which the second is refused.
    """
    content: dict[str, Any] = {
        "directory": str(Path.cwd()),
        "hosts": hosts,
        "command": command,
        "environment": {name: value for name, value in environment.items() if travels(name)},
        "failed": str(failed),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.touch(mode=0o600)
    beside.write_text(json.dumps(content), encoding="ascii")  # bytes of a value that are no UTF-8 survive as surrogates
    beside.rename(path)


def threads(ranks: int, gpus: bool) -> int:
    """CPU threads of each of ``ranks`` ranks of a host.

    With GPUs one: several processes whose idle threads spin for work take the cores from the ones that launch kernels
    (two H200, 32 cores, a step of sequence parallelism: 434 ms with all of them, 343 with half each, 320 with one).
    """
    return 1 if gpus else max(1, (os.cpu_count() or 1) // ranks)


def has_gpus() -> bool:
    """Whether NVIDIA's driver shows a card here, without torch."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 1


def main(arguments: list[str]) -> int:
    """Run the handed-over command here; returns its exit code."""
    path, host = arguments
    try:
        handover = json.loads(Path(path).read_text(encoding="ascii"))
    except OSError as error:
        return _fail(f"{host}: {path}: {error.strerror}; all hosts must see the run folder under the same path")
    try:
        os.chdir(handover["directory"])
    except OSError as error:
        return _fail(f"{host}: {handover['directory']}: {error.strerror}; all hosts must have the working directory")
    environment = {name: value for name, value in os.environ.items() if not travels(name)} | handover["environment"]
    environment.setdefault("OMP_NUM_THREADS", str(threads(handover["hosts"][host], has_gpus())))
    rank = str(list(handover["hosts"]).index(host))
    command = [rank if part == RANK else part for part in handover["command"]]
    parent = os.getppid()
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    failed, deadline = Path(handover["failed"]), None
    while process.poll() is None and (deadline is None or time.monotonic() < deadline):
        if deadline is None and (os.getppid() != parent or failed.exists()):
            deadline = time.monotonic() + GRACE
        time.sleep(0.2)
    forced = process.poll() is None
    end()  # also what the launcher left behind
    code = process.wait()
    code = code if code >= 0 else 128 - code
    if forced and failed.exists():
        return _fail(f"{host}: ended, because {failed.read_text().strip()}")
    if code:
        failed.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), failed.open("x") as file:
            file.write(f"host {host} ended with exit code {code}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
