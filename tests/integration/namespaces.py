"""Hosts for tests: network namespaces on one switch, each with an sshd of its own. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("pdsh", "libgenders0", "openssh-server", "libwrap0")
PORT = 2222


def run(*command: str) -> str:
    """Standard output of a command that must succeed."""
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
    return result.stdout


def tools(folder: Path) -> tuple[Path, Path]:
    """A folder with pdsh to put on PATH, and sshd: the machine's own, or Debian's packages unpacked below ``folder``."""
    pdsh, sshd = shutil.which("pdsh"), shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
    if pdsh and sshd:
        return Path(pdsh).parent, Path(sshd)
    root = folder / "debian"
    root.mkdir()
    for name in PACKAGES:
        got = subprocess.run(["apt-get", "download", "-q", name], cwd=root, capture_output=True, text=True)
        if got.returncode:
            pytest.fail(
                "this test needs pdsh and sshd, and apt-get could not download them: apt install pdsh openssh-server"
            )
    for package in root.glob("*.deb"):
        run("dpkg-deb", "-x", str(package), str(root))
    (library,) = {path.parent for path in root.rglob("libgenders.so.0")}
    # pdsh loads its modules from where Debian installs them and nowhere else: lay the unpacked files over that folder, for
    # this process and its children alone.
    installed = Path("/") / library.relative_to(root)
    mount = f"mount -t overlay overlay -o lowerdir={library}:{installed} {installed}"
    (folder / "bin").mkdir()
    for name, program in (("pdsh", root / "usr/bin/pdsh.bin"), ("sshd", root / "usr/sbin/sshd")):
        called = name if name == "pdsh" else program  # sshd starts itself again by this name
        wrapper = folder / "bin" / name
        wrapper.write_text(
            f'#!/bin/sh\nexec unshare --mount bash -c \'{mount} && exec -a {called} {program} "$@"\' {name} "$@"\n'
        )
        wrapper.chmod(0o755)
    return folder / "bin", folder / "bin" / "sshd"


class Hosts:
    """``count`` network namespaces 10.77.0.1, 10.77.0.2, ... joined by a bridge in one more.

    Attributes:
        addresses: of the hosts.
        environment: with which a launcher in the first host reaches the others through pdsh.
    """

    def __init__(self, count: int, folder: Path):
        self.folder = folder
        self.prefix = f"lightnet{os.getpid()}"
        self.switch = f"{self.prefix}-switch"
        self.names = [f"{self.prefix}-{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self.environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        self.servers: list[subprocess.Popen[bytes]] = []
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge", "forward_delay", "0")
        run("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            run("ip", "netns", "add", name)
            cable = ["link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name]
            run("ip", "-n", self.switch, *cable)
            run("ip", "-n", self.switch, "link", "set", f"port{i}", "master", "bridge0", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """``command`` inside a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def start(self, host: int, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start ``command`` inside a host, in the repository's root; its output goes to ``log``."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.command(host, command),
                cwd=ROOT,
                env=self.environment | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self, host: int) -> None:
        """Unplug a host at the switch: nothing arrives or leaves, and nobody is told."""
        run("ip", "-n", self.switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Plug it in again."""
        run("ip", "-n", self.switch, "link", "set", f"port{host}", "up")

    def serve_ssh(self) -> None:
        """Start an sshd in every host; root logs in by key. Files of the machine are replaced in sshd's mount namespace only."""
        pdsh, sshd = tools(self.folder)
        key, host_key = self.folder / "key", self.folder / "host_key"
        for path in (key, host_key):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
        passwd = Path("/etc/passwd").read_text()
        if "\nsshd:" not in passwd:
            passwd = passwd.rstrip("\n") + "\nsshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
        (self.folder / "passwd").write_text(passwd)
        shadow = self.folder / "shadow"
        shadow.write_text("root:*:19000:0:99999:7:::\n")  # neither a password nor locked
        own = f"mount --bind {self.folder}/passwd /etc/passwd && mount --bind {shadow} /etc/shadow && "
        own += "mount -t tmpfs tmpfs /run && mkdir -p -m 755 /run/sshd && exec "
        for host, address in enumerate(self.addresses):
            config = self.folder / f"sshd_config{host}"
            config.write_text(
                f"Port {PORT}\nListenAddress {address}\nHostKey {host_key}\nAuthorizedKeysFile {key}.pub\nPidFile none\n"
                "StrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\nPrintMotd no\n"
            )
            command = ["unshare", "--mount", "sh", "-c", f"{own}{sshd} -D -e -f {config}"]
            self.servers.append(self.start(host, command, self.folder / f"sshd{host}.log"))
        options = f"-p {PORT} -i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        self.environment["PDSH_SSH_ARGS_APPEND"] = options
        self.environment["PATH"] = f"{pdsh}:{os.environ['PATH']}"
        for host, address in enumerate(self.addresses):
            command = self.command(0, ["ssh", *options.split(), address, "true"])
            for _ in range(100):
                if subprocess.run(command, capture_output=True, env=self.environment).returncode == 0:
                    break
                time.sleep(0.1)
            else:
                raise AssertionError((self.folder / f"sshd{host}.log").read_text())

    def close(self) -> None:
        """Remove everything."""
        for server in self.servers:
            server.terminate()
            server.wait(10)
        for name in (*self.names, self.switch):
            with contextlib.suppress(AssertionError):
                run("ip", "netns", "delete", name)
