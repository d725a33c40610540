"""What several tests under a real Slurm share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.namespaces import Hosts
from tests.integration.slurm import Slurm


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    """Two hosts, each a network namespace, with Slurm on them."""
    (tmp_path / "hosts").mkdir()
    hosts = Hosts(2, tmp_path / "hosts")
    try:
        made = Slurm(hosts, tmp_path / "slurm")
        yield made
        made.close()
    finally:
        hosts.close()
