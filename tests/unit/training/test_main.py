"""How a rank's process ends."""

import subprocess
import sys

import pytest

from lightnet_llm.launch.hosts import free_port

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
