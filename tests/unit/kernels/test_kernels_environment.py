"""LIGHTNET_KERNELS in the environment: all of the kernels can be left out without changing a program. Which Tritons are known,
how each is called, and what is said where PyTorch serves."""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

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


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Called with a version: as if it were installed."""

    def install(version: str | None) -> None:
        monkeypatch.setattr(companions, "_triton_version", lambda: version)
        for cached in (companions.kernels, scan._import_triton):
            cached.cache_clear()

    yield install
    monkeypatch.undo()
    for cached in (companions.kernels, scan._import_triton):
        cached.cache_clear()


@pytest.mark.parametrize("version", [None, "3.5.1", "2.0", "that does not import"])
def test_an_older_triton_is_none(triton: Any, version: str | None) -> None:
    triton(version)
    assert scan.backends() == ["reference", "torch"] and companions.kernels("triton_norms") is None
    x = torch.randn(1, 3, 1, 8)
    for call in (
        lambda: scan.additive_scan(x, x, x, backend="triton"),
        lambda: companions.choose_triton("norm", "triton", "triton_norms", x),
        lambda: toeplitz.toeplitz_scan(x[:, :, 0], torch.rand(8, 2), torch.rand(8, 2), backend="triton"),
        lambda: decode._choose_backend("decode_step", "triton", x, float64=False),
    ):
        with pytest.raises(ValueError, match=r"triton 3\.6 or later") as error:
            call()
        assert "\n" not in str(error.value) and (version or "3.6") in str(error.value)
    assert scan.additive_scan(x, x, x).shape == x.shape


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.10.0+git1", "4.0"])
def test_later_ones_are_tried(triton: Any, version: str) -> None:
    triton(version)
    assert companions.kernels("triton_norms") is not None


def test_a_fallback_on_a_gpu_is_said_once(triton: Any) -> None:
    companions._say_once.cache_clear()
    triton("3.5.1")
    with FakeTensorMode(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x, flat = torch.empty(2, 64, 2, 64, device="cuda"), torch.empty(2, 64, 16, device="cuda")
        for _ in range(2):
            assert (
                scan.choose_backend("auto", x, causal=True) == scan.choose_backend("torch", x, causal=True) == "torch"
            )
            assert not companions.choose_triton("norm", "auto", "triton_norms", flat)
        assert toeplitz._choose_backend("auto", flat, torch.empty(16, 4, device="cuda"), None) == "torch"
    heads = [str(one.message).split(":")[0] for one in said]
    assert heads == ["additive_scan", "norm", "toeplitz_scan"] and all("3.5.1" in str(one.message) for one in said)


@pytest.mark.parametrize("since", ["3.6", "3.7"])
def test_how_a_compiled_kernel_is_started(since: str) -> None:
    """As Triton's own launch does, whose parts differ between versions; with memory of its own only Triton knows how."""
    from lightnet_kernels.triton_launch import _starter

    calls: list[tuple[Any, ...]] = []

    class Launcher:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = False, True

        def __call__(self, *given: Any) -> None:
            calls.append(("whole", *given))

        def launch(self, *given: Any) -> None:
            calls.append(("part", *given))

    launcher = Launcher()
    compiled: Any = SimpleNamespace(run=launcher, function=7, packed_metadata="m")
    if since == "3.7":
        launcher.arg_annotations = []  # type: ignore[attr-defined]
    _starter(compiled)((1, 2, 3), 9, (10, 11), (64,))
    whole = ("whole", 1, 2, 3, 9, 7, "m", None, None, None, 10, 11, 64)
    part = ("part", 1, 2, 3, 9, 7, False, True, None, None, "m", None, None, None, 10, 11, 64)
    assert calls == [whole if since == "3.7" else part]
    launcher.global_scratch_size = 64  # type: ignore[misc]
    _starter(compiled)((1, 2, 3), 9, (10, 11), (64,))
    assert calls[1] == whole
