"""``lightnet prep --executor ray`` on a Ray cluster of two nodes: the local result, and a node's error in one line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightnet_data.tokenizer import Tokenizer

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
# Two nodes of one processor each: a task that wants one must go to both for two to run at a time.
CLUSTER = """
import sys, time, logging
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"first": 1}})
cluster.add_node(num_cpus=1, resources={"second": 1})
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    server = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    address = ""
    while ":" not in address:
        address = server.stdout.readline()
        assert address, "the cluster did not start"
    yield address.strip()
    server.stdin.close()
    server.wait(60)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    (tmp_path / "in").mkdir()
    for number in range(6):
        lines = (json.dumps({"text": f"document {number} {line} of a corpus " * 30}) + "\n" for line in range(40))
        (tmp_path / "in" / f"{number}.jsonl").write_text("".join(lines))
    tokenizer = Tokenizer.train(["a document of a corpus, and another one " * 20], 300).save(tmp_path)
    path = tmp_path / "prep.yaml"
    path.write_text(
        f"inputs: ['{tmp_path}/in/*.jsonl']\noutput: {tmp_path}/local\ntokenizer: {{path: {tokenizer}}}\n"
        "executor: {workers: 2}\n"
    )
    return path


def prep(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from lightnet_data import parts; parts.PART_BYTES = 50000; from lightnet_llm.cli import main; main()"
    command = [sys.executable, "-c", code, "prep", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)


def test_two_nodes_equal_one_machine(cluster: str, config: Path) -> None:
    ray = ["executor.kind=ray", f"executor.settings.address='{cluster}'", "executor.settings.mem_per_cpu_gb=0.25"]
    bad = config.parent / "in" / "3.jsonl"
    good = bad.read_text()
    bad.write_text(good + "broken\n")
    failed = prep("--config", config, f"output={config.parent}/ray", *ray)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1, failed.stderr
    assert failed.stderr.startswith("error: ") and "3.jsonl, line 41" in failed.stderr
    assert not (config.parent / "ray").exists()
    bad.write_text(good)
    for output, more in (("local", []), ("ray", ray)):
        done = prep("--config", config, f"output={config.parent}/{output}", *more)
        assert done.returncode == 0, done.stderr
    for path in (config.parent / "local").iterdir():
        assert (config.parent / "ray" / path.name).read_bytes() == path.read_bytes()
    vocabulary = ["tokenizer.path=null", "tokenizer.vocab_size=300"]
    trained = prep("--config", config, f"output={config.parent}/trained", *vocabulary, *ray)
    assert trained.returncode == 0, trained.stderr
    again = prep("--config", config, f"output={config.parent}/trained2", *vocabulary)
    assert again.returncode == 0
    assert (config.parent / "trained2/train.bin").read_bytes() == (config.parent / "trained/train.bin").read_bytes()


def test_no_cluster_is_one_line(config: Path) -> None:
    failed = prep("--config", config, "executor.kind=ray", "executor.settings.address=127.0.0.1:1")
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1, failed.stderr
    assert "no cluster at 127.0.0.1:1" in failed.stderr and "ray start --head" in failed.stderr
