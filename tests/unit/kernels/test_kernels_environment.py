"""LIGHTNET_KERNELS in the environment: all of the kernels can be left out without changing a program."""

from collections.abc import Iterator

import pytest
import torch
from lightnet_kernels import checks, companions, decode, scan, toeplitz
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    checks._only_torch.cache_clear()
    yield
    checks._only_torch.cache_clear()


def chosen() -> list[str]:
    """What "auto" is for every kind of call on a GPU."""
    with FakeTensorMode():
        x = torch.empty(2, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
        flat, table = torch.empty(2, 64, 16, dtype=torch.bfloat16, device="cuda"), torch.empty(16, 4, device="cuda")
        return [
            scan.choose_backend("auto", x, value=x, theta=None, decay=None, causal=True, exchange=None),
            toeplitz._choose_backend("auto", flat, table, None),
            decode._choose_backend("decode_step", "auto", flat, float64=False),
            "triton" if companions.choose_triton("norm", "auto", "triton_norms", flat) else "torch",
        ]


def test_all_of_them_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "unsupported_device", lambda *_: None)
    monkeypatch.setattr(scan, "_unsupported", lambda *_: None)
    for module in ("triton_toeplitz", "triton_decode"):
        monkeypatch.setattr(companions.kernels(module), "unsupported", lambda *_: None)
    monkeypatch.delenv("LIGHTNET_KERNELS", raising=False)
    assert chosen() == ["triton"] * 4
    checks._only_torch.cache_clear()
    monkeypatch.setenv("LIGHTNET_KERNELS", "torch")
    assert chosen() == ["torch"] * 4
    with FakeTensorMode():
        flat = torch.empty(2, 64, 16, device="cuda")
        assert companions.choose_triton("norm", "triton", "triton_norms", flat), "who names a backend gets it"


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNET_KERNELS", "cuda")
    with pytest.raises(ValueError, match="LIGHTNET_KERNELS is 'cuda' in the environment; set auto or torch"):
        checks.check_backend("norm", "auto", ("auto", "torch"))
