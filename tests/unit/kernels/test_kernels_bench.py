"""The benchmark's plumbing on a CPU: its float64 sums, its verdict, its files, its pictures."""

import copy
import json
import subprocess
import sys
import time
import types

import pytest
import torch
from lightnet_kernels.bench import cases, children, companions, first_call, main, measure, peers, plot, scans, series
from lightnet_kernels.bench.truth import relative, scan_truth

from . import kernel_oracle as oracle

CPU = torch.device("cpu")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(("tokens", "width", "value_width"), [(1, 3, 2), (40, 6, 4), (260, 4, 3)])
def test_the_explicit_sums_are_the_definition(tokens, width, value_width, theta, causal):
    inputs = oracle.make(2, tokens, 2, width, value_width, theta=theta)
    grad = torch.randn(inputs["value"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    output, grads, sizes = oracle.expected(inputs, grad, causal)
    truth = scan_truth(inputs, grad, causal)
    assert relative(truth.output, output) < 1e-12
    assert set(truth.grads) == set(grads)
    for name, wanted in grads.items():
        assert relative(truth.grads[name], wanted, sizes[name]) < 1e-12, name
        if name != "theta" or tokens > 256:  # below, the oracle keeps more of theta's terms apart
            assert float(truth.sizes[name]) == pytest.approx(float(sizes[name]), rel=1e-9)


def test_an_error_that_is_not_a_number_is_infinite():
    assert relative(torch.tensor([1.0, torch.nan]), torch.ones(2)) == float("inf")
    assert not measure.check("error", float("nan"), 1.0)["met"]
    assert not measure.check("time", None, 1.0)["met"]
    assert measure.check("time", 2.0, None)["met"]


def test_inputs_are_fixed_by_the_seed():
    case = cases.SCANS[0].tiny()
    one, two, other = (cases.make_inputs(case, CPU, seed) for seed in (0, 0, 1))
    hashes = [cases.digest({**x.detached(), "grad": x.grad}) for x in (one, two, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    changed = one.detached()
    changed["key"] = changed["key"].clone()
    changed["key"][1, 20, 0, 0] += 1
    assert cases.digest({**changed, "grad": one.grad}) != hashes[0]


def test_floors_of_the_table():
    """The bytes and products written in the issue and the log: 0.09 ms forward at 3.0 TB/s."""
    by_name = {case.name: case for case in cases.SCANS}
    assert by_name["causal-lrpe"].floor_bytes(False) / 3.0e9 == pytest.approx(0.09, abs=0.005)
    assert by_name["bidirectional"].floor_bytes(False) / 3.0e9 == pytest.approx(0.10, abs=0.005)
    assert by_name["causal-lrpe"].floor_flops(False) == 2 * by_name["causal"].floor_flops(False)
    bars = {name: tuple(case.bar) for name, case in by_name.items() if case.bar != cases.UNSET}
    assert bars == {
        "causal-lrpe": (0.45, 1.7),
        "causal": (0.30, 1.1),
        "causal-lrpe-long": (None, 1.9),
        "bidirectional": (0.17, 0.60),
        "bidirectional-long": (None, 0.9),
    }


def context():
    clock = measure.Clock(CPU, repeats=2)
    return scans.Context(clock, measure.ceilings(clock))


@pytest.mark.parametrize("name", ["causal-lrpe", "bidirectional"])
def test_a_wrong_scan_is_found(name, monkeypatch):
    case = next(case for case in cases.SCANS if case.name == name)
    right = scans.run_scan(context(), case)
    assert all(result["met"] for result in right["checks"])
    whole = scans.additive_scan

    def planted(query, key, value, backend, **options):
        return whole(query, key * (1.05 if backend == "torch" and key.dtype != torch.float64 else 1), value, **options)

    monkeypatch.setattr(scans, "additive_scan", planted)
    wrong = scans.run_scan(context(), case)
    assert {x["what"] for x in wrong["checks"] if not x["met"] and x["wrong"]} >= {
        "error of the output",
        "error of the gradient of key",
        "error of the output at size",
    }


def test_runs_that_differ_are_found(monkeypatch):
    whole = scans.additive_scan

    def noisy(query, *rest, **options):
        return whole(query, *rest, **options) * (1 + torch.rand(()).to(query.dtype))

    monkeypatch.setattr(scans, "additive_scan", noisy)
    row = scans.run_scan(context(), cases.SCANS[1])
    assert "two runs differ in bits" in [x["what"] for x in row["checks"] if not x["met"]]


def test_the_series_measure_every_length():
    cost = series.run_cost(context(), cases.COST_CASE)
    assert [point["tokens"] for point in cost["points"]] == [16, 32]
    assert all(point["ns_per_token"]["forward"] > 0 for point in cost["points"])
    figure = series.run_figure(context(), cases.FIGURE_CASES[0])
    factor = figure["points"][0]["factor"]["forward_backward"]
    times = [figure["points"][0][name]["forward_backward"]["ms"] for name in ("two_passes", "one_scan")]
    assert factor == pytest.approx(times[0] / times[1])


@pytest.mark.parametrize("name", [name for name in ("decode", *companions.names()) if name in main.all_cases()])
def test_the_ops_beside_the_scan(name):
    row = main.all_cases()[name](context())
    assert row["checks"] and all(result["met"] for result in row["checks"])
    assert any("error" in result["what"] and result["value"] > 0 for result in row["checks"])


def row_with(*checks):
    return {"case": "a case", "checks": list(checks)}


def test_the_verdict(capsys):
    slow = measure.check("forward", 2.0, 1.0, unit="ms")
    wrong = measure.check("error of the output", 1.0, 5e-3, wrong=True)
    beyond = measure.check("forward", 0.9, 1.0, aim=0.5)
    assert main.verdict({"results": [row_with(beyond)]}) == 0
    assert "beyond the aim" in capsys.readouterr().out
    assert main.verdict({"results": [row_with(slow)]}) == 1
    assert "a case: forward 2 ms, bar 1 ms (2.00 times the bar)" in capsys.readouterr().out
    assert main.verdict({"results": [row_with(wrong)]}) == 1
    assert main.verdict({"results": [{"case": "a case", "error": "RuntimeError: no"}]}) == 1


def test_without_a_gpu_it_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert main.main(["--device", "cpu", "--only", "nothing"]) == 2
    assert "the cases are causal-lrpe," in capsys.readouterr().err
    assert main.main(["--plot", "missing.json"]) == 2


def test_a_failing_case_leaves_the_others(tmp_path, monkeypatch, capsys):
    def fail(context):
        raise RuntimeError("an illegal memory access")

    table = {"one": fail, "two": lambda context: row_with(measure.check("time", 1.0, 2.0))}
    monkeypatch.setattr(main, "all_cases", lambda: table)
    report = {"results": []}
    main.measure(context(), ["one", "two"], report, tmp_path / "kept.json", None)
    kept = json.loads((tmp_path / "kept.json").read_text())["results"]
    assert "illegal memory access" in kept[0]["error"] and kept[1]["checks"][0]["met"]
    assert main.verdict(report) == 1


def test_a_case_that_triton_refuses_fails_on_a_gpu(tmp_path, monkeypatch, capsys):
    met = {"checks": [measure.check("time", 1.0, None)]}
    first = {"calls": {"causal": {"backend_reason": "no triton"}}, **met}
    figure = {"backend_reason": None, "two_passes_reason": "no triton", **met}
    rows = {"scan": {"backend_reason": "no triton", **met}, "first": first, "figure": figure, "good": met}
    monkeypatch.setattr(main, "all_cases", lambda: {name: lambda _, row=row: row for name, row in rows.items()})
    for on_gpu, failed in ((True, ["scan", "first", "figure"]), (False, [])):
        report = {"results": []}
        here = types.SimpleNamespace(clock=types.SimpleNamespace(on_gpu=on_gpu))
        main.measure(here, list(rows), report, tmp_path / "kept.json", None)
        assert [row["case"] for row in report["results"] if "error" in row] == failed
        assert main.verdict(report) == (1 if failed else 0)
    assert "scan: Triton refused: no triton" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"results": 3}', '{"results": [{"case": "cost", "points": [{}]}]}', "\xff"]
)
def test_another_json_is_no_result(text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    assert main.main(["--plot", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --plot {path}: is no result of this command (")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "run", lambda *_: pytest.fail("measured"))
    assert main.main(["--device", "cpu", "--only", "causal", "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: --output {tmp_path}: is a folder; name a file, such as {tmp_path}/kernels.json"
    assert not list(tmp_path.iterdir()) and not list(tmp_path.parent.glob("*.part"))


def test_a_child_that_hangs_or_fails_costs_only_itself(monkeypatch, tmp_path):
    package = tmp_path / "helpers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "hang.py").write_text("import time\ntime.sleep(60)")
    (package / "fail.py").write_text("raise MemoryError('out of memory')")
    (package / "good.py").write_text("import sys\nprint('tuning')\nprint(sys.argv[1])")
    monkeypatch.setattr(children, "__package__", "helpers")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.perf_counter()
    assert children.run_child("hang", {}, 1.0) == {"error": "took more than 1 s"}
    assert time.perf_counter() - start < 20
    assert children.run_child("fail", {}, 60.0) == {"error": "exit 1: MemoryError: out of memory"}
    assert children.run_child("good", {"case": 1}, 60.0) == {"case": 1}


def test_a_run_on_the_cpu_and_its_pictures(tmp_path):
    path = tmp_path / "run.json"
    command = [sys.executable, "-m", "lightnet_kernels.bench", "--device", "cpu", "--output", str(path)]
    done = subprocess.run(
        [*command, "--only", "causal-lrpe", "figure1", "cost", "gated-norm"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    rows = {row["case"]: row for row in report["results"]}
    assert set(report) >= {"card", "versions", "date", "timing", "ceilings", "arguments"}
    assert all(len(row["inputs_sha256"]) == 64 for row in rows.values())
    pictures = [tmp_path / name for name in ("run-lengths.png", "run-figure1.png")]
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
    assert main.main(["--plot", str(path)]) == 0  # no GPU, from the kept JSON
    assert all(picture.exists() for picture in pictures)


@pytest.mark.parametrize("name", ["causal-lrpe", "bidirectional", "bidirectional-lrpe"])
def test_peers(name):
    """Times of each, and that eager PyTorch computes the same thing."""
    case = next(case for case in cases.SCANS if case.name == name).tiny()
    assert peers.peers_of(case)[:2] == ["sdpa", "eager"]
    for peer in ("sdpa", "eager"):
        assert peers.measure_peer(peer, case, CPU)["forward_backward"]["ms"] > 0
    inputs = cases.make_inputs(case, CPU)
    call, leaves, grad = peers.PEERS["eager"](case, inputs)
    output = call()
    wanted = scan_truth(inputs.leaves, inputs.grad, case.causal)
    assert relative(output, wanted.output) < 2e-2  # bf16 throughout
    for one, two in zip(torch.autograd.grad(output, leaves, grad), wanted.grads.values(), strict=True):
        assert relative(one, two) < 5e-2


def test_a_peer_in_a_process_of_its_own():
    case = cases.SCANS[0].tiny()
    assert children.unpacked(json.loads(json.dumps(children.packed(case)))) == case
    found = peers.run_peers(case, CPU, 120.0, ["sdpa", "fla-gla"])
    assert found["sdpa"]["forward"]["ms"] > 0, found


def test_first_calls():
    result = first_call.measure_first_call(cases.SCANS[0].tiny(), "forward+backward", CPU, "torch")
    assert result["first_call_s"] > 0 and result["new_shape_ms"] > 0 and result["compiled_for_a_new_shape"] == 0


def test_memory_allowed():
    """q, k, v, o and a gradient of each in bf16, one state a block in float32, and 10 %."""
    case = cases.SCANS[1].tiny()
    inputs = list(cases.make_inputs(case, CPU).leaves.values())
    states = scans.state_elements(case, "torch")
    assert states == case.batch * case.heads * 1 * case.width * (case.width + 2)
    allowed = measure.memory_bar(inputs, inputs[2], states)["allowed_bytes"]
    assert allowed == int(1.1 * (8 * 2 * case.elements + 4 * states))


def test_a_picture_needs_no_peer_at_every_point(tmp_path):
    times = {"ms": 1.0, "device_ms": None}
    pair = {"forward": times, "forward_backward": times}
    points = [{"tokens": 2**n, **copy.deepcopy(pair)} for n in (11, 12, 13)]
    points[0]["peers"] = {"sdpa": pair}
    points[1]["peers"] = {"sdpa": {"error": "took more than 280 s"}}
    row = {"case": "cost", "points": points, "tokens_a_call": 1, "heads": 1, "width": 1, "lrpe": True, "backend": "x"}
    report = {"results": [row], "card": "a card", "versions": {}, "date": "2026-11-28T00:00:00"}
    assert [x.name for x in plot.draw(report, tmp_path / "a.json")] == ["a-lengths.png"]
