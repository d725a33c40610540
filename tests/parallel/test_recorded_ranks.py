"""Blocks of tensor-parallel ranks, recorded whole."""

import pytest

from tests.forks import Forks

FORKS = Forks("tests.parallel.block_ranks", TRITON_INTERPRET="1")


def test_bits_are_those_of_modules() -> None:
    """With tokens shared and not, kept and computed again; hooks that sum gradients are not recorded."""
    pytest.importorskip("triton")
    done = FORKS.run("tests.parallel.block_ranks:main", "2", timeout=280)
    assert done.code == 0, done.output[-4000:]
