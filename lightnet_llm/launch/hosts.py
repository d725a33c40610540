"""Which hosts a run uses: the strict host file reader, the first host's address, a free port."""

from __future__ import annotations

import random
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from ..errors import UserError

FORM = "'host slots=N', such as 'node-1 slots=8'"
# What ssh and pdsh take as a plain name or IPv4 address: pdsh would expand brackets and read '%', ',' and ':' as its own.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
# Below the range from which Linux takes ports of outgoing connections (32768 up), so that none is taken in between.
PORTS = range(10_000, 32_000)


def read_hostfile(path: Path | str) -> dict[str, int]:
    """Hosts and their slots (ranks), in the order of the file. ``#`` starts a comment; empty lines are skipped.

    Raises:
        UserError: the file cannot be read, or a line is not ``host slots=N``; names file, line number and content.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"hostfile {path}: cannot be read ({error.strerror}); its lines have the form {FORM}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"hostfile {path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    hosts: dict[str, int] = {}
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].split()
        if not text:
            continue
        where, shown = f"{path}:{number}", line.strip()
        match = re.fullmatch(r"slots=([0-9]+)", text[1]) if len(text) == 2 else None
        if match is None:
            raise UserError(f"{where}: '{shown}' is not of the form {FORM}")
        if not _HOST.fullmatch(text[0]):
            raise UserError(f"{where}: '{shown}': '{text[0]}' is neither a host name nor an IPv4 address")
        if int(match[1]) < 1:
            raise UserError(f"{where}: '{shown}': a host needs at least one slot; put a # before it to leave it out")
        if text[0] in hosts:
            raise UserError(f"{where}: '{shown}': host '{text[0]}' is on line {first[text[0]]} already; name it once")
        hosts[text[0]], first[text[0]] = int(match[1]), number
    if not hosts:
        raise UserError(f"hostfile {path}: names no host; its lines have the form {FORM}")
    return hosts


def _address(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET)[0][4][0])
    except OSError as error:
        raise UserError(f"host '{host}' has no address ({error.strerror or error}); is its name spelt right?") from None


def is_here(host: str) -> bool:
    """Whether ``host`` is this machine: an address that a socket can be bound to."""
    with socket.socket() as probe:
        try:
            probe.bind((_address(host), 0))
        except OSError:
            return False
    return True


def master_address(hosts: dict[str, int]) -> str:
    """Address at which the other hosts reach the first one.

    Debian and others map a machine's own name to 127.0.1.1, which is of no use to other hosts: then it is the address
    from which this machine would speak to the second host.

    Raises:
        UserError: a name has no address, or the first host only a loopback one.
    """
    first, *others = hosts
    address = _address(first)
    if not others or not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_address(others[0]), 9))  # sends nothing
            found = str(probe.getsockname()[0])
        except OSError:
            found = address
    if found.startswith("127."):
        raise UserError(
            f"host '{first}' is {address} here, which '{others[0]}' cannot reach; name it by its address in the hostfile"
        )
    return found


def free_port() -> int:
    """A TCP port that nothing on this machine listens at.

    Raises:
        UserError: none was found.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError(
        f"no free port among 100 tried from {PORTS.start} to {PORTS.stop - 1}; close some listening programs"
    )


def free_port_on(host: str, shell: list[str]) -> int:
    """A free port of ``host``, which is asked through ``shell`` (such as ssh with its options) if it is not this machine.

    Raises:
        UserError: the host does not answer, or has no such Python.
    """
    if is_here(host):
        return free_port()
    remote = shlex.join([sys.executable, "-c", "from lightnet_llm.launch.hosts import free_port; print(free_port())"])
    try:
        answer = subprocess.run([*shell, host, remote], capture_output=True, text=True, timeout=60, check=True).stdout
        return int(answer.split()[-1])
    except subprocess.TimeoutExpired:
        raise UserError(f"host '{host}' did not answer within 60 s to `{shlex.join([*shell, host])}`") from None
    except (subprocess.CalledProcessError, OSError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise UserError(
            f"host '{host}' could not be asked for a free port: {said[-1] if said else error}; it must be reachable by "
            f"ssh without a password and have {sys.executable}"
        ) from None
