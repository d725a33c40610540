"""Figures of cards: the shipped ones, files of `lightnet plan --calibrate`, and what is refused of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightnet_llm.errors import UserError
from lightnet_llm.plan import hardware
from lightnet_llm.plan.hardware import load_hardware
from tests.conftest import ROOT
from tests.unit.plan.command import run


def test_figures_written_before_some_were_measured(tmp_path: Path) -> None:
    """They are those of the shipped card: as they are, or by the host that was measured."""
    old = ROOT / "benchmarks" / "calibration-nvidia-h200-x2-2026-11-28.json"
    data = json.loads(old.read_text())
    for key in ("sustained", "host_stage_3_s"):
        data["cards"]["h200"]["figures"].pop(key, None)
    (tmp_path / "old.json").write_text(json.dumps(data))
    found, shipped = load_hardware("h200", tmp_path / "old.json"), load_hardware("h200")
    assert found.sustained == shipped.sustained and found.host_block_s != shipped.host_block_s
    by_host = ["host_stage_3_s", "host_tensor_s", "host_shared_s"]
    for name in by_host:
        wanted = found.host_block_s / shipped.host_block_s
        assert getattr(found, name) / getattr(shipped, name) == pytest.approx(wanted)
    assert {"sustained", *by_host} <= {*found.assumed}


def test_figures_say_where_they_come_from() -> None:
    for name in hardware.cards():
        figures = load_hardware(name).figures
        assert set(figures) == set(hardware.FIGURES)
        for key, figure in figures.items():
            assert set(figure) == {"value", "unit", "source", "card", "date", "assumed"}, key
            assert figure["source"]
            assert figure["assumed"] or (figure["card"] and figure["date"]), key
    h100, a100 = load_hardware("h100"), load_hardware("a100-80")
    assert a100.gemm_flop_s(1e11) == pytest.approx(h100.gemm_flop_s(1e11) * 312 / 989)
    assert a100.norm_s / h100.norm_s == pytest.approx(h100.copy_bytes_s / a100.copy_bytes_s)
    assert a100.scan_s / h100.scan_s > h100.copy_bytes_s / a100.copy_bytes_s, "kernels that only an sm_90 runs"
    rates = [h100.gemm_flop_s(10.0**power) for power in range(3, 14)]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1, "cards": {"h100": {}}}', "card 'h100' is not a mapping that holds figures"),
        ('{"format": 1, "cards": {"h100": 5}}', "card 'h100' is not a mapping that holds figures"),
        ('{"format": 2, "cards": {}}', "format 1"),
        ('{"format": 1, "cards": {}}', "there are none"),
        (f'{{"format": 1, "cards": {"[" * 100_000}', "not JSON"),
        ('{"format": 1, "cards": {"h100": {"card": "x", "peak": "H100", "figures": {}}}}', "no figure 'gemm_flop_s'"),
        ('{"format": 1, "cards": {"h100": {"card": 5, "peak": "H100", "figures": {}}}}', "card 5, not a name"),
        ('{"format": 1, "cards": {"h100": {"card": "x", "peak": "H1", "figures": {}}}}', "no peak_flop_s"),
        ('{"format": 1, "cards": {"h100": {"card": "x", "peak_flop_s": 0, "figures": {}}}}', "peak_flop_s 0, not"),
        (
            '{"format": 1, "cards": {"x": {"card": "x", "peak": "H100", "figures": {}, "like": "y"}}}',
            "card 'x' is like 'y', a card that has no figures",
        ),
        (
            '{"format": 1, "cards": {"x": {"card": "x", "peak": "H100", "figures": {}, "like": "h100"}, '
            '"h100": {"card": "y", "peak": "H100", "figures": {}, "like": "x"}}}',
            "is like cards that are like it",
        ),
    ],
)
def test_a_damaged_calibration_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cards.json"
    path.write_text(text)
    result = run("pile_1b", "--figures", str(path))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "--calibrate" in result.stderr and message in result.stderr, result.stderr


def changed(tmp_path: Path, key: str, **parts: Any) -> Path:
    """The shipped figures, but parts of one of an H100's; a part that is None is taken out."""
    data = json.loads(hardware.SHIPPED.read_text())
    figure = data["cards"]["h100"]["figures"].setdefault(key, {"value": 1.0, "unit": "s", "assumed": True})
    figure |= parts
    for part in [part for part, value in parts.items() if value is None and part != "value"]:
        del figure[part]
    path = tmp_path / "cards.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("card", ["h100", "l40s"])  # its own, and those of the card that it is like
@pytest.mark.parametrize(
    ("key", "parts", "message"),
    [
        ("scan_s", {"value": None}, "value is null, not a finite positive number"),
        ("scan_s", {"value": "abc"}, 'value is "abc", not a finite positive number'),
        ("scan_s", {"value": float("nan")}, "value is NaN, not a finite positive number"),
        ("scan_s", {"value": float("inf")}, "value is Infinity, not a finite positive number"),
        ("scan_s", {"value": 10**400}, "not a finite positive number"),
        ("scan_s", {"value": True}, "value is true, not a finite positive number"),
        ("host_block_s", {"value": 0}, "value is 0, not a finite positive number"),
        ("memory_bytes", {"value": -5}, "value is -5, not a finite positive number"),
        ("context_bytes", {"value": -1}, "value is -1, not a finite positive number"),
        ("per_node", {"value": 0}, "value is 0, not a whole number from 1 on"),
        ("per_node", {"value": 1.5}, "value is 1.5, not a whole number from 1 on"),
        ("gemm_flop_s", {"value": 3.0}, "value is 3.0, not a list of pairs"),
        ("gemm_flop_s", {"value": []}, "value is [], not a list of pairs"),
        ("gemm_flop_s", {"value": [[1e9, 0.0]]}, "value is [[1000000000.0, 0.0]], not a list of pairs"),
        ("gemm_flop_s", {"value": [[1e9]]}, "value is [[1000000000.0]], not a list of pairs"),
        ("scan_s", {"assumed": None}, "no assumed"),
        ("scan_s", {"assumed": "no"}, 'assumed is "no", not true or false'),
        ("scan_s", {"unit": None}, "no unit"),
        ("scan_lrpe", {}, "no figure has this name (did you mean 'scan_lrpe_s'?)"),
    ],
)
def test_a_figure_that_is_none_is_one_line(
    tmp_path: Path, card: str, key: str, parts: dict[str, Any], message: str
) -> None:
    path = changed(tmp_path, key, **parts)
    result = run("pile_1b", "--gpu", card, "--figures", str(path))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1 and message in result.stderr, result.stderr
    assert f"{path}: " in result.stderr and f"card 'h100', figure '{key}'" in result.stderr
    assert "lightnet plan --calibrate" in result.stderr


@pytest.mark.parametrize("key", hardware.PERHAPS_ZERO)
def test_what_a_card_may_lack_may_be_zero(tmp_path: Path, key: str) -> None:
    assert getattr(load_hardware("h100", changed(tmp_path, key, value=0)), key) == 0


@pytest.mark.parametrize("path", [None, *sorted((ROOT / "benchmarks").glob("calibration-*.json"))])
def test_figures_of_this_project_are_as_they_must_be(path: Path | None) -> None:
    for name in hardware.cards(path):
        assert set(load_hardware(name, path).figures) == {*hardware.FIGURES}


def test_no_more_processes_than_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.multiprocessing.spawn", lambda *_, **__: pytest.fail("processes were started"))
    result = run("--calibrate", "--gpus", "3", "--output", str(tmp_path / "cards.json"))
    assert result.exit_code == 1 and result.stderr.count("\n") == 1, result.output
    assert "--gpus 3: this host has no card and 2 cores; give at most 2" in result.stderr


def test_where_no_figures_can_go_is_said_before_any_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightnet_llm.plan.calibrate._measured", lambda *_: pytest.fail("it was measured"))
    folder, file = tmp_path / "cards.json", tmp_path / "x.json"
    folder.mkdir()
    answers = [run("--calibrate", "--output", str(folder))]
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    answers.append(run("--calibrate", "--output", str(file)))
    for result, target in zip(answers, (folder, file), strict=True):
        assert result.exit_code == 1 and result.stderr.count("\n") == 1, result.output
        assert f"--output {target}: cannot be written" in result.stderr
    assert list(tmp_path.iterdir()) == [folder]


def test_calibration_is_used(tmp_path: Path) -> None:
    path = tmp_path / "cards.json"
    result = run("--calibrate", "--gpus", "1", "--output", str(path))
    assert result.exit_code == 0, result.output
    measured = load_hardware("cpu", path)
    assert measured.figures["scan_s"]["card"] == "cpu"
    assert not measured.figures["scan_s"]["assumed"]
    assert measured.figures["per_node"]["assumed"] and measured.figures["host_stage_3_s"]["assumed"]
    assert 0 < measured.sustained < 100 and not measured.figures["sustained"]["assumed"]
    answer = json.loads(run("wikitext103", "--gpus", "1", "--figures", str(path), "--json").stdout)
    assert answer["gpu"]["name"] == "cpu"
    assert "scan_s" not in answer["gpu"]["assumed"]


@pytest.mark.slow
def test_several_ranks_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "cards.json"
    result = run("--calibrate", "--gpus", "2", "--output", str(path))
    assert result.exit_code == 0, result.output
    measured = load_hardware("cpu", path)
    for name in hardware.BY_HOST:
        assert getattr(measured, name) > 0 and not measured.figures[name]["assumed"]
    assert measured.nvlink.bytes_s > 0


def test_a_calibrated_card_is_like_the_shipped_one_of_its_name(tmp_path: Path) -> None:
    """What is not measured comes from the shipped card, also under the same name; a card like itself alone is refused."""
    path = tmp_path / "mine.json"
    shipped = json.loads(hardware.SHIPPED.read_text())
    entry = shipped["cards"]["h100"]
    figures = {key: entry["figures"][key] for key in ("copy_bytes_s", "gemm_flop_s")}
    for name, fits in (("h100", True), ("mine", False)):
        path.write_text(json.dumps({**shipped, "cards": {name: {**entry, "figures": figures, "like": name}}}))
        if fits:
            assert load_hardware(name, path).figures["copy_bytes_s"] == figures["copy_bytes_s"]
        else:
            with pytest.raises(UserError, match="not as --calibrate writes it"):
                load_hardware(name, path)
