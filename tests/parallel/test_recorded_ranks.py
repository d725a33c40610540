"""Blocks of tensor-parallel ranks, recorded whole."""

import pytest

from tests.forks import Forks

FORKS = Forks("tests.parallel.block_ranks", TRITON_INTERPRET="1")


@pytest.mark.parametrize("few", [["few"], pytest.param([], marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("world", ["2", "4"], ids=["whole", "around an exchange"])
def test_bits_are_those_of_modules(world: str, few: list[str]) -> None:
    """With tokens shared and not, kept and computed again; hooks that sum gradients are not recorded."""
    pytest.importorskip("triton")
    done = FORKS.run("tests.parallel.block_ranks:main", world, "cpu", *few, timeout=280)
    assert done.code == 0, done.output[-4000:]
