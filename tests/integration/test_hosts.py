"""Several hosts, for real: network namespaces of this machine, once without ssh and once through pdsh and sshd."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Ranks, read_metrics, steps_of
from tests.integration.namespaces import Hosts
from tests.integration.test_launcher import FIELDS, LIGHTNET, ours, wait_for_step

pytestmark = pytest.mark.system

ODD = {
    "LIGHTNET_SPACES": "two words  and two spaces ",
    "LIGHTNET_QUOTES": """it's "quoted" `id` $HOME \\ and %n %h %%""",
    "LIGHTNET_EQUALS": "a=b=c;d|e&f>g\nsecond line",
    "LIGHTNET_UTF8": "\u00e9\u4e2d",
    "NCCL_DEBUG_FILE": "/tmp/a b.%h.%p",
    "PYTHONPATH": os.environ.get("PYTHONPATH", "") + ":/nowhere/a b:/nowhere/$c",
}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    folder = tmp_path / "hosts"
    folder.mkdir()
    made = Hosts(3, folder)
    yield made
    for process in ours(str(tmp_path)):
        if "sshd" not in process.name():
            process.kill()
    made.close()


def hostfile(hosts: Hosts, slots: list[int]) -> Path:
    path = hosts.folder / "hostfile"
    path.write_text("".join(f"{a} slots={n}  # one host\n" for a, n in zip(hosts.addresses, slots, strict=False)))
    return path


def test_without_ssh_equals_one_host(hosts: Hosts, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """The launcher started by hand on each of two hosts."""
    common = ["parallel.tensor=2", "train.steps=12"]
    whole = steps_of(ranks.train(4, tiny, common, tmp_path, "whole"), *FIELDS)
    launcher = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile",
        str(hostfile(hosts, [2, 2])),
        "--no_ssh",
    ]
    launcher += ["--master_addr", hosts.addresses[0], "--master_port", "29600", "--node_rank"]
    training = ["launch/train.py", "--config", str(tiny), f"train.output={tmp_path}", "train.name=run", *common]
    logs = [tmp_path / f"host{i}.log" for i in range(2)]
    processes = [hosts.start(i, [*launcher, str(i), *training], logs[i], DS_ACCELERATOR="cpu") for i in range(2)]
    for process, log in zip(processes, logs, strict=True):
        assert process.wait(timeout=150) == 0, log.read_text()[-3000:]
    assert steps_of(read_metrics(tmp_path / "run"), *FIELDS) == whole


def test_through_pdsh_and_sshd(hosts: Hosts, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """`lightnet train --hostfile`: odd names and variables arrive whole; stopped and resumed it equals one host's run."""
    hosts.serve_ssh()
    common = ["parallel.tensor=2", "train.steps=40", "model.dropout=0.1", "validation.interval=0"]
    whole = steps_of(ranks.train(4, tiny, common, tmp_path, "whole"), *FIELDS)
    name = "it's 100%n of $HOME"
    run = tmp_path / name
    command = [*LIGHTNET, "train", str(tiny), "--hostfile", str(hostfile(hosts, [2, 1, 1]))]
    command += [f"train.output={tmp_path}", f"train.name={name}", "train.resume=auto", *common]
    process = hosts.start(0, command, tmp_path / "first.log", **ODD)
    wait_for_step(run, 3, process, tmp_path / "first.log")
    seen = []
    for rank in (p for p in ours(str(tmp_path)) if any("training.main" in part for part in p.cmdline())):
        environment = rank.environ()
        if "RANK" in environment:
            seen.append(int(environment["RANK"]))
            assert {key: environment.get(key) for key in ODD} == ODD
    assert sorted(seen) == [0, 1, 2, 3], (tmp_path / "first.log").read_text()[-3000:]
    for child in psutil.Process(process.pid).children(recursive=True):
        assert not any("two words" in part for part in child.cmdline()), "an environment may hold secrets"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, (tmp_path / "first.log").read_text()[-3000:]
    assert 3 <= max(steps_of(read_metrics(run), "loss")) < 40, "the stop must come midway"
    assert not (run / "handover.json").exists()
    process = hosts.start(0, command, tmp_path / "second.log", **ODD)
    assert process.wait(timeout=120) == 0, (tmp_path / "second.log").read_text()[-3000:]
    assert steps_of(read_metrics(run), *FIELDS) == whole
    assert not [p for p in ours(str(run)) if p.pid != os.getpid()], "processes were left behind"


def test_a_killed_rank_ends_all_hosts(hosts: Hosts, tiny: Path, tmp_path: Path) -> None:
    hosts.serve_ssh()
    command = [*LIGHTNET, "train", str(tiny), "--hostfile", str(hostfile(hosts, [1, 1]))]
    command += [f"train.output={tmp_path}", "train.name=run", "train.steps=5000", "checkpoint.interval=5"]
    process = hosts.start(0, command, tmp_path / "log")
    wait_for_step(tmp_path / "run", 6, process, tmp_path / "log")
    victim = next(p for p in ours(str(tiny)) if "RANK" in p.environ() and p.environ()["RANK"] == "1")
    victim.kill()
    assert process.wait(timeout=60) != 0
    assert hosts.addresses[1] in (tmp_path / "log").read_text()
    deadline = time.time() + 30
    while ours(str(tiny)) and time.time() < deadline:
        time.sleep(0.2)
    assert not ours(str(tiny)), "processes were left behind"
    assert (tmp_path / "run" / "checkpoints" / "step_00000005").is_dir()


def test_a_host_cut_off_in_mid_run(hosts: Hosts, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Unplugged at the switch, nobody is told: all end within 60 s and name the cause; plugged in again, the run goes on."""
    hosts.serve_ssh()
    common = ["train.steps=60", "checkpoint.interval=5", "checkpoint.keep_last=100", "validation.interval=0"]
    whole = steps_of(ranks.train(3, tiny, [*common, "train.global_batch=6"], tmp_path, "whole"), *FIELDS)
    common += ["train.global_batch=6", "watchdog.step_seconds=20"]
    command = [*LIGHTNET, "train", str(tiny), "--hostfile", str(hostfile(hosts, [1, 1, 1]))]
    command += [f"train.output={tmp_path}", "train.name=run", "train.resume=auto", *common]
    run, log = tmp_path / "run", tmp_path / "first.log"
    process = hosts.start(0, command, log)
    wait_for_step(run, 8, process, log)
    hosts.cut(2)
    saved = {path.name for path in (run / "checkpoints").glob("step_*")}
    deadline = time.time() + 60
    assert process.wait(timeout=60) != 0
    text = log.read_text()
    while [p for p in ours(str(run)) if p.is_running()] and time.time() < deadline:
        time.sleep(0.2)
    assert not ours(str(run)), f"processes were left behind\n{text[-3000:]}"
    assert "rank 2" in text and "error: " in text, text[-3000:]
    assert saved <= {path.name for path in (run / "checkpoints").glob("step_*")} and saved
    hosts.mend(2)
    process = hosts.start(0, command, tmp_path / "second.log")
    assert process.wait(timeout=150) == 0, (tmp_path / "second.log").read_text()[-3000:]
    assert steps_of(read_metrics(run), *FIELDS) == whole


def test_a_restart_goes_on_without_the_lost_host(hosts: Hosts, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """`--restarts`: the host that no longer answers is left out, the global batch stays, and the losses are the same."""
    hosts.serve_ssh()
    common = ["train.steps=60", "checkpoint.interval=5", "validation.interval=0", "train.global_batch=12"]
    whole = steps_of(ranks.train(3, tiny, common, tmp_path, "whole"), "loss", "samples")
    command = [*LIGHTNET, "train", str(tiny), "--hostfile", str(hostfile(hosts, [1, 1, 1]))]
    command += ["--restarts", "2", "--back-off", "1", f"train.output={tmp_path}", "train.name=run", *common]
    run, log = tmp_path / "run", tmp_path / "log"
    process = hosts.start(0, [*command, "watchdog.step_seconds=20"], log)
    wait_for_step(run, 8, process, log)
    hosts.cut(2)
    assert process.wait(timeout=240) == 0, log.read_text()[-3000:]
    text = log.read_text()
    assert f"supervisor: hosts gone: {hosts.addresses[2]}" in text, text[-3000:]
    assert "supervisor: going on with 2 of 3 ranks; the global batch stays" in text
    rows = read_metrics(run)
    events = [row for row in rows if row.get("event") in ("failed", "restarted")]
    assert [row["event"] for row in events] == ["failed", "restarted"] and events[1]["world"] == 2
    found = steps_of(rows, "loss", "samples")
    assert list(found) == list(whole) and [x[1] for x in found.values()] == [x[1] for x in whole.values()]
    assert max(abs(found[step][0] - whole[step][0]) for step in whole) < 1e-5
    assert not ours(str(run)), "processes were left behind"
