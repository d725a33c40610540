"""Bad arguments raise ValueError in one line that names what, where, and a way out; the package shadows nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightnet_kernels import (
    ToeplitzState,
    additive_scan,
    identity_state,
    merge_states,
    merge_toeplitz_states,
    shift_state,
    toeplitz_scan,
)
from lightnet_kernels.compiling import constant_result, uncompiled

X = torch.randn(1, 10, 2, 8)
LONG = torch.int64


def cuts(*bounds, dtype=LONG):
    return torch.tensor(bounds, dtype=dtype)


BAD_SCANS = [
    ({"query": X[0]}, ["query", "(10, 2, 8)", "[B, N, H, width]"]),
    ({"key": X[:, :5]}, ["key", "(1, 5, 2, 8)", "(1, 10, 2, 8)"]),
    ({"value": X[:, :5]}, ["value", "(1, 5, 2, 8)"]),
    ({"value": X.long()}, ["value", "int64", "floating"]),
    ({"value": torch.randn(1, 10, 2, 129)}, ["value", "129", "128"]),
    ({"theta": torch.ones(8)}, ["theta", "(8,)", "[2, 8]"]),
    ({"decay": X[..., :4]}, ["decay", "(1, 10, 2, 4)"]),
    ({"activation": "relu"}, ["activation", "'relu'", "'silu'"]),
    ({"backend": "cuda"}, ["backend", "'cuda'", "torch"]),
    ({"cu_seqlens": cuts(1, 10)}, ["cu_seqlens[0]", "1", "must be 0"]),
    ({"cu_seqlens": cuts(0, 6, 4, 10)}, ["cu_seqlens[2] = 4", "cu_seqlens[1] = 6"]),
    ({"cu_seqlens": cuts(0, 6, 12)}, ["cu_seqlens[2] = 12", "10"]),
    ({"cu_seqlens": cuts(0, 6, 9)}, ["cu_seqlens[2] = 9", "N = 10"]),
    ({"cu_seqlens": cuts(0, 10, dtype=torch.int16)}, ["cu_seqlens", "int16", "int32"]),
    ({"cu_seqlens": cuts(0.0, 10.0, dtype=torch.float32)}, ["cu_seqlens", "float32"]),
    ({"cu_seqlens": cuts(0)}, ["cu_seqlens", "at least 2"]),
    ({"cu_seqlens": torch.tensor(10)}, ["cu_seqlens", "()", "at least 2"]),
    ({"cu_seqlens": torch.tensor(10), "causal": False}, ["cu_seqlens", "()", "at least 2"]),
    (
        {"query": X.expand(2, -1, -1, -1), "key": X.expand(2, -1, -1, -1), "value": X.expand(2, -1, -1, -1),
         "cu_seqlens": cuts(0, 10)},
        ["B = 2", "flatten"],
    ),
    ({"key_mask": torch.ones(1, 10)}, ["key_mask", "float32", "bool"]),
    ({"key_mask": torch.ones(1, 9, dtype=torch.bool)}, ["key_mask", "(1, 9)", "[1, 10]"]),
    ({"coordinates": torch.arange(10)}, ["coordinates", "causal"]),
    ({"coordinates": torch.arange(9), "causal": False}, ["coordinates", "(9,)", "N = 10"]),
    ({"coordinates": torch.rand(10), "causal": False}, ["coordinates", "float32", "integers"]),
    ({"coordinates": torch.ones(10, 3, dtype=LONG), "causal": False}, ["3 coordinate axes", "width 8"]),
    ({"initial_state": identity_state(2, 2, 8, 8)}, ["initial_state.max", "(2, 2, 8)", "(1, 2, 8)"]),
    ({"initial_state": identity_state(1, 2, 8, 8), "theta": torch.ones(2, 8)}, ["initial_state.kv", "2D"]),
    ({"initial_state": identity_state(1, 2, 8, 8), "cu_seqlens": cuts(0, 5, 10)}, ["initial_state", "segment"]),
    ({"query": X.tolist()}, ["query", "list", "tensor"]),
    ({"query": None}, ["query", "NoneType", "tensor"]),
    ({"theta": torch.ones(2, 8, device="meta")}, ["theta", "meta", "cpu", "move it"]),
    ({"decay": X.to("meta")}, ["decay", "meta", "cpu", "move it"]),
    ({"theta": [0.1]}, ["theta", "list", "tensor"]),
    ({"theta": torch.ones(2, 8, dtype=LONG)}, ["theta", "int64", "floating"]),
    ({"cu_seqlens": [0, 10]}, ["cu_seqlens", "list", "tensor"]),
    ({"key_mask": True}, ["key_mask", "bool", "tensor"]),
    ({"initial_state": (1, 2)}, ["initial_state", "tuple", "ScanState"]),
    ({"exchange": object()}, ["exchange", "prefix"]),
    ({"exchange": object(), "causal": False}, ["exchange", "total"]),
    ({"exchange": object(), "causal": False, "theta": torch.ones(2, 8)}, ["exchange", "coordinates"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BAD_SCANS)
def test_bad_scan_arguments(change, words):
    arguments = {"query": X, "key": X, "value": X, **change}
    with pytest.raises(ValueError) as error:
        additive_scan(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)
    message = str(error.value)
    assert "\n" not in message and message.startswith("additive_scan: ")
    for word in words:
        assert word in message


RATES = torch.rand(8, 3)
BAD_TOEPLITZ = [
    ({"x": X}, ["x is", "(1, 10, 2, 8)"]),
    ({"decay": torch.rand(7, 3)}, ["decay", "(7, 3)", "d = 8"]),
    ({"gain": torch.rand(8, 4)}, ["gain", "(8, 4)"]),
    ({"backend": "fft"}, ["backend", "'fft'"]),
    ({"cu_seqlens": cuts(0, 11)}, ["cu_seqlens[1] = 11"]),
    ({"key_mask": torch.ones(1, 10)}, ["key_mask"]),
    ({"initial_state": ToeplitzState(torch.zeros(1, 8, 4), torch.zeros(1))}, ["initial_state.hidden", "(1, 8, 3)"]),
    ({"x": X[:, :, 0].numpy()}, ["x is", "ndarray", "tensor"]),
    ({"gain": None}, ["gain", "NoneType", "tensor"]),
    ({"decay": RATES.numpy()}, ["decay", "ndarray", "tensor"]),
    ({"decay": RATES.to("meta")}, ["decay", "meta", "cpu", "move it"]),
    ({"cu_seqlens": [0, 10]}, ["cu_seqlens", "list", "tensor"]),
    ({"cu_seqlens": torch.tensor(10)}, ["cu_seqlens", "()", "at least 2"]),
    ({"key_mask": [True] * 10}, ["key_mask", "list", "tensor"]),
    ({"initial_state": torch.zeros(1, 8, 3)}, ["initial_state", "Tensor", "ToeplitzState"]),
    ({"initial_state": identity_state(1, 2, 8, 8)}, ["initial_state", "ScanState", "ToeplitzState"]),
    ({"exchange": object()}, ["prefix"]),
    ({"exchange": type("OnlyPrefix", (), {"prefix": id})(), "bidirectional": True}, ["suffix"]),
]


@pytest.mark.parametrize(("change", "words"), BAD_TOEPLITZ)
def test_bad_toeplitz_arguments(change, words):
    arguments = {"x": X[:, :, 0], "decay": RATES, "gain": RATES, **change}
    with pytest.raises(ValueError) as error:
        toeplitz_scan(arguments.pop("x"), arguments.pop("decay"), arguments.pop("gain"), **arguments)
    message = str(error.value)
    assert "\n" not in message and message.startswith("toeplitz_scan: ")
    for word in words:
        assert word in message


ONE, LRPE, THETA = identity_state(2, 2, 8, 8), identity_state(2, 2, 8, 8, lrpe=True), torch.ones(2, 8)
SUMS = ToeplitzState(torch.zeros(2, 8, 3), torch.zeros(2, dtype=LONG))
BAD_MERGES = [
    (merge_states, (ONE, identity_state(1, 2, 8, 8)), "kv shapes"),
    (merge_states, (ONE, ONE, THETA), "twice"),
    (merge_states, (LRPE, LRPE, THETA[0]), r"theta has shape \(8,\); expected \[H, D\] = \[2, 8\]"),
    (merge_states, (LRPE, LRPE, THETA[:1]), r"theta has shape \(1, 8\)"),
    (merge_states, (LRPE, LRPE, [0.1]), "theta is of type list; pass a tensor"),
    (merge_states, (LRPE, LRPE, THETA.to("meta")), "theta is on meta"),
    (merge_states, (SUMS, SUMS), "left is of type ToeplitzState; pass a ScanState"),
    (merge_states, (ONE, None), "right is of type NoneType"),
    (shift_state, (ONE, 3, THETA), "twice"),
    (shift_state, (LRPE, 3, THETA[0]), r"theta has shape \(8,\)"),
    (shift_state, (LRPE, 1.5, THETA), "tokens are of type float; pass an int"),
    (shift_state, (ONE, 1.5, None), "tokens are of type float"),
    (shift_state, (LRPE, torch.tensor(1.5), THETA), r"tokens are torch.float32 \(\)"),
    (shift_state, (LRPE, torch.tensor([True, False]), THETA), "tokens are torch.bool"),
    (shift_state, (LRPE, torch.tensor([1, 2, 3]), THETA), r"\(3,\); pass .* integers \[B\] = \[2\]"),
    (shift_state, (SUMS, 1, None), "state is of type ToeplitzState"),
    (merge_toeplitz_states, (SUMS, SUMS._replace(hidden=torch.zeros(2, 8, 4)), RATES), "hidden shapes"),
    (merge_toeplitz_states, (SUMS, SUMS, RATES[0]), r"decay has shape \(3,\); expected \[d, e\] = \[8, 3\]"),
    (merge_toeplitz_states, (SUMS, SUMS, RATES[:, 0]), r"decay has shape \(8,\)"),
    (merge_toeplitz_states, (SUMS, SUMS, 0.5), "decay is of type float"),
    (merge_toeplitz_states, (SUMS, ONE, RATES), "right is of type ScanState; pass a ToeplitzState"),
    (merge_toeplitz_states, (SUMS.hidden, SUMS.hidden, RATES), "left is of type Tensor"),
]


@pytest.mark.parametrize(("function", "arguments", "words"), BAD_MERGES)
def test_bad_merges(function, arguments, words):
    with pytest.raises(ValueError, match=rf"^{function.__name__}: [^\n]*{words}"):
        function(*arguments)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("theta", [None, torch.ones(0, 8)])
def test_no_heads(causal, backend, theta):
    x = X[:, :, :0].clone().requires_grad_()
    output, state = additive_scan(x, x, x, theta=theta, causal=causal, backend=backend, return_state=True)
    assert output.shape == x.shape and state.kv.shape[1] == 0 and state.length.tolist() == [10]
    output.sum().backward()
    assert x.grad.shape == x.shape


def test_transformers_still_imports_from_the_repository_root():
    """A folder called kernels once shadowed the library that transformers looks for."""
    root = Path(__file__).resolve().parents[3]
    code = "import lightnet_kernels; from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "LlamaForCausalLM"


def test_padding_cu_seqlens_changes_nothing():
    plain, state = additive_scan(X, X, X, cu_seqlens=cuts(0, 4, 10), return_state=True)
    padded, longer = additive_scan(X, X, X, cu_seqlens=cuts(0, 4, 10, 10, 10, 10), return_state=True)
    assert torch.equal(plain, padded) and torch.equal(longer.kv[:2], state.kv)
    assert (longer.max[2:] == -torch.inf).all() and not longer.length[2:].any()


def test_what_the_compiler_is_told_of_functions(monkeypatch):
    import torch._dynamo

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # commands set it, and so for the whole process
    torch._dynamo.reset()
    calls = []

    @constant_result
    def once():
        calls.append(torch.compiler.is_compiling())
        return len(calls)

    def constant(x):
        return x + once()

    run = torch.compile(constant, backend="eager", fullgraph=True)
    assert run(torch.zeros(2)).tolist() == run(torch.zeros(2)).tolist() == [1, 1]

    @uncompiled
    def apart(x):
        calls.append(torch.compiler.is_compiling())
        return x + 1

    assert apart(torch.zeros(1)).item() == 1
    assert torch.compile(lambda x: apart(x) * 2, backend="eager")(torch.zeros(1)).item() == 2
    assert calls[1:] == [False, False]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: apart(x) * 2, backend="eager", fullgraph=True)(torch.zeros(1))
