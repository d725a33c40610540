"""A small Slurm for tests: Debian's packages, unpacked, with one controller and a slurmd in every namespace."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integration.namespaces import Hosts, run

PACKAGES = (
    "slurm-client",
    "slurmctld",
    "slurmd",
    "slurm-wlm-basic-plugins",
    "libslurm38",
    "libmunge2",
    "munge",
    "libhwloc15",
)
CONF = """ClusterName=test
SlurmctldHost=node0(10.77.0.1)
AuthType=auth/none
CredType=cred/none
PluginDir={library}/slurm-wlm
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Slurm over ``hosts``; node i is called ``node<i>``. No GPUs are configured, so a script must not ask for them."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts, self.folder = hosts, folder
        self.root = folder / "debian"
        self.root.mkdir(parents=True)
        for name in PACKAGES:
            got = subprocess.run(["apt-get", "download", "-q", name], cwd=self.root, capture_output=True, text=True)
            if got.returncode:
                pytest.fail(f"this test needs Debian 12's Slurm, and apt-get could not download {name}")
        for package in self.root.glob("*.deb"):
            run("dpkg-deb", "-x", str(package), str(self.root))
        (library,) = {path.parent for path in self.root.rglob("libhwloc.so.15")}
        self.installed = Path("/") / library.relative_to(self.root)
        self.library = library
        (folder / "state").mkdir()
        conf = CONF.format(folder=folder, library=library)
        names = ""
        for i, address in enumerate(hosts.addresses):
            conf += f"NodeName=node{i} NodeAddr={address} NodeHostname=node{i} CPUs=2 State=UNKNOWN\n"
            names += f"{address} node{i}\n"
            (folder / f"spool-node{i}").mkdir()
        (folder / "slurm.conf").write_text(conf)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "hosts").write_text(names)
        self.daemons = [self._start(0, "slurmctld", "-D", "-c", "-f", f"{folder}/slurm.conf")]
        for i in range(len(hosts.names)):
            stepd = str(self.root / "usr/sbin/slurmstepd-wlm")
            arguments = ["-D", "-N", f"node{i}", "-f", f"{folder}/slurm.conf", "-d", stepd]
            self.daemons.append(self._start(i, "slurmd", *arguments))
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.time() + 60
        while self.shell("sinfo -h -o '%t %D'").split() != ["idle", str(len(self.hosts.names))]:
            if time.time() > deadline:
                raise AssertionError("\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log")))
            time.sleep(0.5)

    def _inside(self, host: int, *command: str) -> list[str]:
        """``command`` in a host's own view of libraries, cgroups, name and name service."""
        mounts = f"mount -t overlay overlay -o lowerdir={self.library}:{self.installed} {self.installed} && "
        mounts += f"mount -t cgroup2 cgroup2 /sys/fs/cgroup; hostname node{host} && mount --bind {self.folder}/hosts /etc/hosts"
        paths = f"export LD_LIBRARY_PATH={self.library}/slurm-wlm SLURM_CONF={self.folder}/slurm.conf"
        script = f'{mounts} && {paths} PATH={self.root}/usr/bin:$PATH && exec "$@"'
        return ["unshare", "--mount", "--uts", "bash", "-c", script, "bash", *command]

    def _start(self, host: int, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = str(self.root / f"usr/sbin/{name}-wlm")
        return self.hosts.start(host, self._inside(host, program, *arguments), self.folder / f"{name}{host}.log")

    def shell(self, script: str) -> str:
        """Standard output of a shell command on node 0."""
        command = self.hosts.command(0, self._inside(0, "bash", "-c", script))
        environment = self.hosts.environment
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60).stdout

    def close(self) -> None:
        """End all daemons and what they started."""
        self.shell("scancel --state=RUNNING; scancel --state=PENDING")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def until(reached: Callable[[], bool], seconds: float, told: Callable[[], str]) -> None:
    """Wait for something, and else fail with what ``told`` says."""
    deadline = time.time() + seconds
    while not reached():
        assert time.time() < deadline, told()
        time.sleep(0.5)
