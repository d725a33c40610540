"""How a rank's process ends."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightnet_llm.launch.hosts import free_port
from tests.conftest import ROOT

RANK = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch.distributed as dist
from lightnet_llm.training import main

port = int(sys.argv[1])
master = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
def talk():
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        store.set("a", "b")
pool = ThreadPoolExecutor(1)
pool.submit(id, 0).result()
def late():
    time.sleep(0.3)
    print("a thread ended")
def ranks_work():
    for _ in range(4):
        threading.Thread(target=talk, daemon=True).start()
    threading.Thread(target=late).start()
    time.sleep(0.2)
    return int(sys.argv[2])
atexit.register(print, "what was registered ran")
main.main = ranks_work
main.process()
"""


@pytest.mark.parametrize("code", [0, 3])
def test_threads_in_the_store_do_not_abort_a_rank(code: int) -> None:
    command = [sys.executable, "-c", RANK, str(free_port()), str(code)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == code, found.stderr[-2000:]
    if code == 0:
        assert found.stdout.splitlines() == ["a thread ended", "what was registered ran"]


def test_a_port_that_is_taken_is_one_line(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "launch/train.py", "--config", str(tiny), f"train.output={tmp_path}"]
        environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        found = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
        )
    assert found.returncode and "Traceback" not in found.stderr, found.stderr[-3000:]
    (error,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: port {port} of this host is taken")
