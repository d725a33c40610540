"""The page about a run: what it says, that it stands alone, that nothing in it is taken for markup."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from lightnet_llm.cli import main
from lightnet_llm.report import charts
from lightnet_llm.report.read import read_run

from .conftest import Maker


class Page(HTMLParser):
    """Text, headings and everything that could load something."""

    def __init__(self, html: str):
        super().__init__()
        self.text, self.tags, self.addresses, self.ids = "", [], [], []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value)
            self.addresses += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def report(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["report", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def page_of(*arguments: str) -> tuple[str, Page]:
    code, out, err = report(*arguments)
    assert code == 0, err
    html = Path(out.strip()).read_text()
    return html, Page(html)


def write_extras(run: Path, sample: str) -> None:
    baselines = {"gzip -9": {"bytes": 700, "bits_per_byte": 2.7654}, "xz -9": {"bytes": 600, "bits_per_byte": 2.3456}}
    heldout = {"bits_per_byte": 2.1234, "baselines": baselines, "documents": 7, "bytes": 2048, "tokens": 900}
    heldout |= {"perplexity": 9.5, "word_perplexity": 88.25, "data": "data/validation", "checkpoint": "step_00000040"}
    (run / "heldout.json").write_text(json.dumps(heldout))
    (run / "sample.txt").write_text(sample)


def test_one_run(make_run: Maker) -> None:
    run = make_run("made")
    write_extras(run, "Once upon a time\nthere was 水.\n")
    html, page = page_of(str(run))
    assert (run / "report.html").read_text() == html
    for wanted in (
        "step 40 of 40, 20.5k tokens, train loss 2.0549, heldout 2.1549, code 1.8549, finished at step 40, resumed once",
        "Loss over steps",
        "Loss over tokens",
        "Validation, bits per byte",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Peak memory, GB",
        "2.1234",
        "gzip -9",
        "2.7654",
        "xz -9",
        "2.3456",
        "Once upon a time\nthere was 水.",
        "c0ffee with changes (source.diff)",
        "lightnet train made 'train.name=a b'",
        "torch 2.13.0",
        "glu_width: 64",
        "layout 2 ranks",
        "0.25 spause for a checkpoint, median",
    ):
        assert wanted in page.text, wanted
    assert page.tags.count("svg") == 7
    assert "Model FLOP utilisation" not in page.text  # null in every line


def test_the_page_stands_alone(make_run: Maker) -> None:
    run = make_run("made")
    write_extras(run, "text")
    html, page = page_of(str(run))
    assert page.addresses and all(re.fullmatch(r"#[\w-]+", address) for address in page.addresses)
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert "http:" not in html and "https:" not in html and "@import" not in html
    assert charts.INK not in html and "currentColor" in html and "prefers-color-scheme: dark" in html


def test_nothing_is_taken_for_markup(make_run: Maker) -> None:
    bad = "<script>alert('x')</script><b>&amp;"
    run = make_run("a<i>b&c$d$_")
    write_extras(run, bad)
    config = (run / "config.yaml").read_text().replace("name: made", f'name: "{bad}"')
    (run / "config.yaml").write_text(config)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "validation": {"<i>s</i>": {"loss": 2.0}}}) + "\n")
        file.write(json.dumps({"step": 40, "event": "<b>e", "why": "<u>"}) + "\n")
    with (run / "environment.jsonl").open("a") as file:
        file.write(json.dumps({"started": "<h1>", "command": ["<h5>"], "git": {"commit": "<h6>", "diff": None}}) + "\n")
    other = make_run("plain/a<i>b&c$d$_")  # and in the charts and tables of several runs
    for arguments in ([str(run)], [str(run), str(other), "--output", str(run / "two.html")]):
        _, page = page_of(*arguments)
        assert not {"script", "i", "u", "h5", "h6"} & set(page.tags)
        assert page.tags.count("h1") == 1
        assert bad in page.text and "a<i>b&c$d$_" in page.text and "<i>s</i>" in page.text and "<b>e" in page.text


def test_several_runs(make_run: Maker, tmp_path: Path) -> None:
    first, second = make_run("first"), make_run("second", steps=30, rate=6e-4, offset=0.5)
    write_extras(first, "only the first has a sample")
    code, _, err = report(str(first), str(second))  # which do lie in one folder
    assert code == 1 and "--output" in err and "in common" not in err and err.count("\n") == 1
    _, page = page_of(str(first), str(second), "--output", str(tmp_path / "both.html"))
    for wanted in (
        "LightNet runs: first, second",
        "first, heldout",
        "second, heldout",
        "Sample: first",
        "optimizer.learning_rate",
        "0.0006",
        "train.steps",
        "Events: second",
    ):
        assert wanted in page.text, wanted
    assert "Sample: second" not in page.text
    code, _, err = report(str(first), str(first), "--output", str(tmp_path / "x.html"))
    assert code == 1 and "given twice" in err


def test_runs_of_one_name_are_told_apart(make_run: Maker, tmp_path: Path) -> None:
    first, second = make_run("x/run"), make_run("y/run", offset=1.0)
    _, page = page_of(str(first), str(second), "--output", str(tmp_path / "both.html"))
    assert f"{first}, heldout" in page.text and f"{second}, heldout" in page.text


def test_a_run_that_just_began(make_run: Maker) -> None:
    run = make_run("young")
    (run / "metrics.jsonl").write_text("")
    (run / "environment.jsonl").unlink()
    (run / "config.yaml").unlink()
    _, page = page_of(str(run))
    assert "no training step was written down yet" in page.text and "svg" not in page.tags
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "grad_norm": 1.0, "tokens": 5}\n{"step": 2, "lo')
    _, page = page_of(str(run))
    assert "unreadable lines left out: 1" in page.text and page.tags.count("svg") == 1


@pytest.mark.parametrize(
    "content", [b"\x8f\x00\xff\n\xfe{\n", b"5\n[]\n", b'{"loss": 1.0}\n{"step": "x", "loss": 1.0}\n']
)
def test_a_run_without_a_readable_line(make_run: Maker, content: bytes) -> None:
    run = make_run("made")
    (run / "metrics.jsonl").write_bytes(content)
    _, page = page_of(str(run))
    assert "no training step was written down yet, unreadable lines left out: 2" in page.text


@pytest.mark.parametrize(
    "changes",
    [
        {"norms": 5},
        {"norms": [1.0]},
        {"norms": {"gradient": 5}},
        {"norms": {"weight": "abc"}},
        {"loss": "abc"},
        {"tokens": "abc"},
        {"tokens": float("nan")},
        {"time": float("nan")},
        {"step": float("inf")},
        {"step": 10**400},
    ],
)
def test_a_line_with_what_is_not_of_its_type(make_run: Maker, changes: dict[str, object]) -> None:
    run = make_run("made")
    append(run, {"step": 41, "loss": 1.0, "time": 2e9, **changes}, {"step": 42, "loss": 0.125, "tokens": None})
    _, page = page_of(str(run))
    assert "step 42 of 40, train loss 0.1250" in page.text and "unreadable lines left out: 1" in page.text


def test_a_folder_with_a_pictures_name(make_run: Maker) -> None:
    run = make_run("made")
    (run / "x.png").mkdir()
    (run / "y.png").write_bytes(b"picture")
    _, page = page_of(str(run))
    assert page.tags.count("img") == 1


def test_the_time_of_a_run_counts_its_pauses(make_run: Maker) -> None:
    run = make_run("made")
    append(run, {"step": 41, "loss": 1.0, "time": 1e9 + 641})  # resumed ten minutes later
    _, page = page_of(str(run))
    assert "10 min 40 sfirst to last step, pauses between starts included" in page.text


def test_colours_of_many_lines(make_run: Maker, tmp_path: Path) -> None:
    assert len({charts.color_of(index) for index in range(56)}) == 56
    runs = [str(make_run(f"run{index}", steps=2)) for index in range(1, 18)]
    html, _ = page_of(*runs, "--output", str(tmp_path / "all.html"))
    assert len(set(re.findall(r'class="swatch" style="background:(#\w+)"', html))) == 17
    run = make_run("sets")  # and of the sets of one run
    append(run, {"step": 40, "validation": {f"set{index}": {"bits_per_byte": 1.0 + index} for index in range(17)}})
    html, _ = page_of(str(run))
    (drawn,) = re.findall(r'aria-label="Validation bits per byte".*?</svg>', html, re.DOTALL)
    lines = re.findall(r'id="validation-bits-per-byte-line-\d+">.*?stroke: (#\w+)', drawn, re.DOTALL)
    assert len(lines) == len(set(lines)) == 18


def append(run: Path, *rows: dict[str, object]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_run_that_diverged(make_run: Maker) -> None:
    """Numbers that are not finite are written as null: norms are left out, and the last loss says of which step it is."""
    run, norms = make_run("diverged"), {"gradient": {"qkv": 1.0, "tpe": None}, "weight": {"qkv": None}}
    append(run, {"step": 39, "loss": None, "norms": norms}, {"step": 40, "loss": None, "norms": None})
    _, page = page_of(str(run))
    assert "train loss not a number from step 39 on" in page.text and "2.0671 at step 38last train loss" in page.text
    assert "Gradient norm by kind" in page.text and "Weight norm by kind" not in page.text
    (run / "metrics.jsonl").write_text("")
    append(run, {"step": 1, "loss": None, "norms": norms})
    _, page = page_of(str(run))
    assert "Gradient norm by kind" in page.text and "last train loss" not in page.text


@pytest.mark.parametrize("config", ["- a\n- b\n", "words\n", "model: words\ntrain: [1]\n", "{"])
def test_a_configuration_that_is_none(make_run: Maker, config: str) -> None:
    run = make_run("made")
    (run / "config.yaml").write_text(config)
    append(run, {"step": 40, "event": "resumed", "time": 1e20})
    _, page = page_of(str(run))
    assert "last train loss, nats a token" in page.text and "step 40, 20.5k tokens" in page.text


def test_reading_drops_what_a_resume_ran_again(make_run: Maker) -> None:
    run = make_run("made")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "loss": 9.0, "tokens": 1}) + "\n")
    read = read_run(run)
    assert len(read.steps) == 40 and read.steps[6]["loss"] == 9.0
    assert read.validation_series("loss")["code"][0] == [10, 20, 30, 40]


def test_only_lines_with_a_loss_are_steps(make_run: Maker) -> None:
    """What a checkpoint or an evaluation says of a step stands beside its loss and does not replace it."""
    run = make_run("made")
    with (run / "metrics.jsonl").open("a") as file:
        scores = {"acc": 0.25, "acc_stderr": 0.01}
        file.write(json.dumps({"step": 40, "evaluation": {"piqa": scores, "arc": {"acc": 0.5}, "seconds": 2.5}}) + "\n")
        file.write(json.dumps({"step": 40, "something": "new"}) + "\n")
    read = read_run(run)
    assert [row["loss"] for row in read.steps] == pytest.approx([2 + 3 * math.exp(-s / 10) for s in range(1, 41)])
    assert read.saves == [{"step": step, "pause_seconds": 0.25} for step in (10, 20, 30, 40)]
    assert read.metrics() == ["acc"] and read.damaged == 0
    assert read.evaluation_series("acc") == {"piqa": ([40], [0.25]), "arc": ([40], [0.5])}
    _, page = page_of(str(run))
    assert "Evaluation tasks" in page.text and "piqa" in page.text and "acc_stderr" not in page.text
    assert "while a checkpoint is written" not in page.text


def test_steps_beside_an_asynchronous_save(make_run: Maker) -> None:
    run = make_run("made")
    with (run / "metrics.jsonl").open("a") as file:
        for slower in (0.5, 0.7, None):  # the last step of a run has none beside it
            saved = {"step": 40, "pause_seconds": 0.25, "step_seconds_while_writing": slower, "step_seconds": 0.4}
            file.write(json.dumps({"step": 40, "checkpoint": saved}) + "\n")
    _, page = page_of(str(run))
    assert "0.6 s; 0.4 s without" in page.text


def test_tasks_of_several_runs_have_a_chart_each(make_run: Maker, tmp_path: Path) -> None:
    runs = [make_run("first"), make_run("second")]
    for run, score in zip(runs, (0.25, 0.5), strict=True):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 40, "evaluation": {"piqa": {"acc": score}, "arc": {"acc": score}}}) + "\n")
    _, page = page_of(*map(str, runs), "--output", str(tmp_path / "both.html"))
    assert "acc of piqa" in page.text and "acc of arc" in page.text


@pytest.mark.parametrize(("head", "unit"), [("classifier", "nats an image"), (None, "nats a token")])
def test_losses_have_the_unit_of_their_head(make_run: Maker, head: str | None, unit: str) -> None:
    run = make_run("made")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("head: causal_lm", f"head: {head}") if head else "")
    _, page = page_of(str(run))
    assert f"last train loss, {unit}" in page.text and page.text.count(unit) >= 4  # tiles and axes


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, None, "holds no metrics.jsonl"),
        ("heldout.json", "{", "heldout.json: not JSON"),
        ("heldout.json", "[]", "heldout.json: not a result of lightnet eval"),
        ("heldout.json", '{"bits_per_byte": 1.0, "baselines": [5]}', "heldout.json: not a result of lightnet eval"),
        ("heldout.json", '{"bits_per_byte": 1.0, "bytes": "many"}', "heldout.json: not a result of lightnet eval"),
    ],
)
def test_errors_are_one_line(make_run: Maker, file: str | None, content: str | None, message: str) -> None:
    run = make_run("made")
    if file is None:
        (run / "metrics.jsonl").unlink()
    else:
        (run / file).write_text(content or "")
    code, out, err = report(str(run))
    assert code == 1 and out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_output_that_cannot_be_written(make_run: Maker, tmp_path: Path) -> None:
    run, folder = str(make_run("made")), tmp_path / "folder"
    folder.mkdir()
    before = sorted(tmp_path.iterdir())
    for target in (tmp_path / "no" / "x.html", folder):
        code, _, err = report(run, "--output", str(target))
        assert code == 1 and f"{target}: cannot be written" in err and err.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == before


def test_thinning_keeps_ends_and_spikes() -> None:
    y = [1.0] * 50_000
    y[12_345] = 99.0
    x, kept = charts.thin(range(50_000), y)
    assert len(x) <= charts.POINTS + 2 and max(kept) == 99.0 and x[0] == 0 and x[-1] == 49_999
    assert charts.thin([1, 2], [3, 4]) == ([1, 2], [3, 4])


def test_what_the_axis_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest values of a line's beginning; no line as a whole, and no values of its end."""
    tops: list[float] = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_ylim", lambda axes, **limits: tops.append(limits["top"]))

    def top(*losses: list[float]) -> float | None:
        tops.clear()
        lines = [charts.Line(str(len(y)), range(len(y)), y, charts.INK) for y in losses]
        assert charts.chart("Loss", lines, clip_peaks=True)
        return tops[0] if tops else None

    falls = [2.6 + 8.2 * (1 + step / 60) ** -0.6 for step in range(10, 50_001, 10)]
    alone, beside = top(falls), top(falls, falls[:100])
    assert alone is not None and falls[500] < alone < 4 < falls[0]
    assert beside is None or beside > falls[10]
    assert (
        top([3.0 + 0.001 * (step % 7) for step in range(2000)], [9.0 + 0.001 * (step % 7) for step in range(50)])
        is None
    )
    assert top([3 + 3 * math.exp(-step / 300) for step in range(1900)] + [11.0] * 100) is None
    spiked = [2 + 9 * math.exp(-step / 10) for step in range(1000)]
    spiked[500] = 4.0
    found = top(spiked)
    assert found is not None and 4.0 < found < 11.0


def test_moving_mean() -> None:
    assert charts.moving_mean([1.0, 2.0, 6.0], 3) == [1.5, 3.0, 4.0]


def test_a_long_run_stays_a_small_page(make_run: Maker) -> None:
    run = make_run("long", steps=8_000)
    html, _ = page_of(str(run))
    assert len(html) < 600_000
