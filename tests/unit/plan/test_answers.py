"""What the command answers: text, JSON, pictures; its refusals in one line."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightnet_llm.config import load_config
from lightnet_llm.errors import UserError
from lightnet_llm.plan import planner, scaling
from lightnet_llm.plan.hardware import load_hardware
from tests.conftest import ROOT
from tests.unit.plan.command import run

ROW = {
    "layout": dict, "zero_stage": int, "tensor_sequence_parallel": bool, "fits": bool, "close": bool,
    "refused": (str, type(None)), "parameters_per_rank": list, "micro_batch": int, "gradient_accumulation_steps": int,
    "recompute_every": int, "largest_micro_batch": dict, "memory_bytes": dict, "block_bytes": dict, "moved_per_step": list,
    "step_seconds": dict, "tokens_per_second": float, "model_flop_utilisation": float, "days": float,
    "cost": (float, type(None)),
}  # fmt: skip
TOP = {
    "name": str, "parameters": int, "precision": str, "tokens": int, "hours": (float, type(None)), "tokens_per_step": int,
    "gpus": int, "gpu": dict, "price": (float, type(None)), "layouts": list, "recommended": dict, "configured": dict,
    "enough": (dict, type(None)), "format": int, "problem": type(None),
}  # fmt: skip


ZERO = "deepspeed.zero_optimization"
OFFLOAD = "deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}"


def fits_schema(value: dict[str, Any], schema: dict[str, Any]) -> None:
    assert set(value) == set(schema)
    for key, kind in schema.items():
        assert isinstance(value[key], kind), key


def test_json(tmp_path: Path) -> None:
    picture = tmp_path / "scaling.svg"
    result = run(
        "wikitext103", "--gpus", "2", "--price", "2", "--json", "--plot", str(picture), "train.global_batch=16"
    )
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    scaling = answer.pop("scaling")
    fits_schema(answer, TOP)
    for row in answer["layouts"]:
        fits_schema(row, ROW)
        memory = dict(row["memory_bytes"])
        total = memory.pop("total")
        del memory["stage"], memory["peak"]
        assert sum(memory.values()) == total
        seconds = dict(row["step_seconds"])
        assert sum(seconds.pop("communication").values()) + sum(seconds.values()) == pytest.approx(2 * seconds["total"])
    fits_schema(answer["recommended"], {**ROW, "reason": str, "overrides": list})
    best = answer["recommended"]
    assert best["cost"] == pytest.approx(best["days"] * 24 * 2 * 2)
    assert best["days"] == pytest.approx(answer["tokens"] / best["tokens_per_second"] / 86400)
    assert {point["gpus"] for point in scaling["batch a card"]} >= {1, 2, 1024, 4096}
    assert picture.read_text().startswith("<?xml")


def test_more_cards_that_do_not_help_are_said() -> None:
    small = ("pile_1b", "--gpus", "1024", "train.global_batch=64")
    (line,) = [line for line in run(*small).stdout.splitlines() if "are no faster than" in line]
    answer = json.loads(run(*small, "--json").stdout)
    fewer, best = answer["enough"], answer["recommended"]["tokens_per_second"]
    assert line.startswith(f"1024 GPUs are no faster than {fewer['gpus']}: ") and line.count(f"{best:,.0f}") == 1
    assert fewer["gpus"] < 1024 and fewer["tokens_per_second"] * planner.ALIKE >= best
    again = run(*small, "--gpus", str(fewer["gpus"] // 2))
    assert again.exit_code == 0 and "are no faster than" not in again.stdout
    off = run("pile_150m", "--gpus", "2", "deepspeed={zero_optimization: {offload_optimizer: {device: none}}}")
    assert off.exit_code == 0 and "are no faster than" not in off.stdout


def test_fewer_cards_are_looked_for_in_whole_hosts() -> None:
    """97 cards are hosts of one, which are slow; 16 of two hosts are not. More cards may be faster again."""
    answer = json.loads(run("pile_1b", "--gpus", "97", "--json", "train.global_batch=256").stdout)
    some = json.loads(run("pile_1b", "--gpus", "16", "--json", "train.global_batch=256").stdout)
    assert answer["enough"]["gpus"] == 16
    assert answer["enough"]["tokens_per_second"] == pytest.approx(some["recommended"]["tokens_per_second"])


def test_long_rows_are_refused_with_the_cards_that_would_do() -> None:
    done = run("pile_379m", "--gpus", "2", "data.sequence_length=8388608", "train.global_batch=1")
    assert done.exit_code == 1 and re.search(r"it fits on \d+ \(--gpus \d+\), as sequence \d+", done.output), (
        done.output
    )


def test_the_next_number_of_cards_that_a_run_fits_is_named() -> None:
    """Not only doublings."""
    given = ("pile_2.9b", "--gpu", "a100-40", "train.micro_batch=1")
    long = ("data.sequence_length=1048576", "train.global_batch=8")
    done = run(*given, *long, "--gpus", "10")
    found = re.search(r"it fits on (\d+) \(--gpus \1\)", done.stderr)
    assert done.exit_code == 1 and found and 10 < int(found[1]) < 20, done.output
    assert run(*given, *long, "--gpus", found[1]).exit_code == 0


def test_a_long_row_leaves_gaps() -> None:
    """On a card of 141 GB a row of 786,432 tokens trained and one of 1,048,576 ran out of memory: docs/parallel.md."""
    for tokens, code in ((786_432, 0), (1_048_576, 1)):
        done = run(
            "pile_379m", "--gpus", "1", "--gpu", "h200", f"data.sequence_length={tokens}", "train.global_batch=1"
        )
        assert done.exit_code == code, done.output


def test_what_does_not_fit_is_shown_where_it_is_asked_for() -> None:
    given = ("pile_2.9b", "--gpus", "1", "--gpu", "a100-40")
    every = run(*given, "--all")
    assert every.exit_code == 1 and every.stderr.startswith("error: no layout") and every.stderr.count("\n") == 1
    assert every.stdout.count("does not fit") >= 4 and "recommended" not in every.stdout
    program = run(*given, "--json")
    answer = json.loads(program.stdout)
    assert program.exit_code == 1 and program.stderr == every.stderr
    assert answer["recommended"] is None and f"error: {answer['problem']}\n" == program.stderr
    for row in answer["layouts"]:
        fits_schema(row, ROW)
        assert not row["fits"]


def test_the_picture_has_the_plans_own_point() -> None:
    """Layouts that nothing else draws, too: shared rows on two cards."""
    config, card = (
        load_config("pile_2.9b", ["data.sequence_length=32768", "train.global_batch=8"]),
        load_hardware("h200"),
    )
    found = planner.plan(config, 2, card)
    assert found.recommended.choice.sequence == 2
    points = scaling.scaling(found, card)
    for same in ("batch", "batch a card"):
        (own,) = [point for point in points[same] if point.gpus == 2]
        assert own.tokens_per_second == found.tokens_per_second(found.recommended) and own.layout.startswith(
            "sequence 2"
        )
    alone = scaling.scaling(planner.plan(load_config("pile_150m", ["train.global_batch=4"]), 8, card), card)
    assert alone["batch"] and not alone["batch a card"]  # which would be half a sample


def test_a_small_cost_is_shown() -> None:
    text = run("cramming", "--gpus", "1", "train.hours=null", "train.steps=100", "--price", "2").stdout
    assert re.search(r"cost 0\.\d+", text), text


def test_a_recommended_command_names_a_field_once() -> None:
    text = run("pile_1b", "--gpus", "2", "train.micro_batch=2", "train.global_batch=64").stdout
    (line,) = [line for line in text.splitlines() if line.startswith("  lightnet train ")]
    assert line.count("train.micro_batch=") == 1


def test_the_pages_table_of_layouts() -> None:
    docs = ROOT / "docs"
    scope: dict[str, Any] = {"__name__": "page", "__file__": str(docs / "make_layouts.py")}
    exec((docs / "make_layouts.py").read_text(), scope)
    assert (docs / "parallel.md").read_text() == scope["page"](), "run python docs/make_layouts.py"


def test_text() -> None:
    result = run("pile_150m", "--gpus", "2", "--gpu", "h100", "--price", "2.5")
    assert result.exit_code == 0, result.output
    for part in ("146,361,600 parameters", "recommended:", "data 2, ZeRO 1", "as configured", "assumed, not measured"):
        assert part in result.stdout
    everything = run("pile_150m", "--gpus", "2", "--all").stdout
    assert everything.count("\n") > result.stdout.count("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a CONFIG"),
        (["pile_1z"], "did you mean"),
        (["pile_1b", "--gpu", "h10"], "did you mean 'h100'"),
        (["pile_1b", "--gpu", "A100"], r"did you mean 'a100-80' or 'a100-40'\?"),
        (["pile_1b", "--gpu", "h20"], "did you mean 'h200'"),
        (
            ["pile_1b", OFFLOAD],
            r"offload_optimizer: lightnet plan does not know .* \(deepspeed.*offload_optimizer=null\)",
        ),
        (
            ["pile_150m", f"{ZERO}.stage3_prefetch_bucket_size=abc"],
            f"{ZERO}.stage3_prefetch_bucket_size is 'abc', .* such as",
        ),
        (
            ["pile_150m", f"{ZERO}.stage3_max_live_parameters=null"],
            f"{ZERO}.stage3_max_live_parameters is None, not a num",
        ),
        (["pile_150m", f"{ZERO}.reduce_bucket_size=-5"], f"{ZERO}.reduce_bucket_size is -5, not a number of elements"),
        (["pile_1b", "--price", "nan"], "not a price"),
        (["pile_1b", "--price", "inf"], "not a price"),
        (["pile_1b", "--gpus", "5003"], "no layout of this run is legal on 5003 ranks"),
        (["pile_1b", "model.heds=3"], "unknown key"),
        (["pile_1b", "--plot", "x.pdf"], r"x\.png"),
        (["pile_1b", "--plot", "nowhere/x.png"], "not a folder"),
        (["pile_1b", "--figures", "nowhere.json"], "cannot be read"),
        (["pile_1b", "--figures", __file__], "not JSON"),
        (["--calibrate", "--output", "nowhere/x.json"], "--output nowhere/x.json: cannot be written"),
        (["pile_1b", "--calibrate"], "takes no CONFIG"),
        (["pile_1b", "--output", "x.json"], "--output x.json: .* --calibrate"),
        (["classify/emoji"], r"classifier: lightnet plan knows .* start the run with train\.stop_at_step"),
        (["pile_2.9b", "--gpus", "1", "--gpu", "a100-40"], "39.4 GiB"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pile_1b", "--gpus", "0"], "--gpus.*0 is not in the range"),
        (["pile_1b", "--gpus", "many"], "--gpus.*'many' is not"),
        (["pile_1b", "--price", "-1"], "--price.*range"),
        (["pile_1b", "--nosuch"], "No such option.*--nosuch"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert re.search(f"^error: .*{message}.*plan --help", result.stderr), result.stderr


def test_scaling_keeps_the_budget_and_says_where_there_is_none(tmp_path: Path) -> None:
    config = load_config("pile_150m", ["train.tokens=null", "train.steps=1000"])
    card = load_hardware("h100")
    points = scaling.scaling(planner.plan(config, 2, card), card)["batch a card"]
    rates = [point.days * point.tokens_per_second for point in points]
    assert len(points) > 3 and max(rates) == pytest.approx(min(rates))
    with pytest.raises(UserError, match="leave --plot out"):
        scaling.draw({"batch": [], "batch a card": []}, "none", tmp_path / "x.png")


def test_a_picture_is_whole_or_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightnet_data import output

    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "x.svg"
    path.write_text("before")
    monkeypatch.setattr(output, "flush", full)
    point = scaling.Point(2, 10.0, 0.5, 1.0, "data 2", 8)
    with pytest.raises(UserError, match=r"x\.svg: cannot be written .No space left"):
        scaling.draw({"batch": [point], "batch a card": []}, "none", path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
