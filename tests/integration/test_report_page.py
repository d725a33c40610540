"""The page of ``lightnet report`` in a real browser: nothing asked for from outside, every value drawn, nothing cut off."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightnet_llm.cli import main
from tests.conftest import ROOT, Ranks
from tests.integration.browser import Browser, Page
from tests.unit.report.conftest import Maker, make_run  # noqa: F401 (a fixture)

pytestmark = pytest.mark.system
WIDTHS = (320, 768, 1280)

# Of every chart: title, box, values and markers of its lines, words. A line of n values is a path M x y L x y ...
CHARTS = r"""[...document.querySelectorAll("figure svg")].map(svg => ({
  title: svg.getAttribute("aria-label"),
  box: svg.getBoundingClientRect().toJSON(),
  lines: [...svg.querySelectorAll("g[id*='-line-']")].map(line => ({
    places: [...line.querySelector("path").getAttribute("d").matchAll(/[ML] (\S+) (\S+)/g)].map(m => [+m[1], +m[2]]),
    drawn: line.getBoundingClientRect().toJSON(),
    markers: line.querySelectorAll("use").length,
    color: getComputedStyle(line.querySelector("path")).stroke})),
  texts: [...svg.querySelectorAll("text")].map(text => ({text: text.textContent, box: text.getBoundingClientRect().toJSON()})),
  ink: getComputedStyle(svg.querySelector("text")).fill}))"""

# What reaches beyond the window although no box around it scrolls.
CUT = """[...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll > *, pre") &&
  e.getClientRects().length && (e.getBoundingClientRect().right > innerWidth + .5 || e.getBoundingClientRect().left < -.5)
).map(e => e.tagName + " " + e.textContent.slice(0, 40))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser) -> Page:
    return browser.page()


@pytest.fixture
def shot(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """Keeps a picture of the page under build/pages/, to be looked at."""
    folder = ROOT / "build" / "pages"
    folder.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(folder / f"{request.node.name}-{name}.png")


def write(*runs: Path, output: Path) -> Path:
    result = CliRunner().invoke(main, ["report", *map(str, runs), "--output", str(output)])
    assert result.exit_code == 0, result.output
    return output


def charts(page: Page) -> dict[str, dict[str, Any]]:
    """Charts by title, each looked at for what only a browser shows."""
    found = {chart["title"]: chart for chart in page.evaluate(CHARTS)}
    for title, chart in found.items():
        box = chart["box"]
        assert box["width"] >= 240 and 0.4 < box["height"] / box["width"] < 0.7, (title, box)
        assert chart["lines"], title
        for line in chart["lines"]:
            assert inside(line["drawn"], box), (title, line)
            assert max(line["drawn"]["width"], line["drawn"]["height"]) > 1, (title, line)
        for text in chart["texts"]:
            assert inside(text["box"], box), (title, text)
    return found


def inside(inner: dict[str, float], outer: dict[str, float], slack: float = 2.0) -> bool:
    return (
        inner["left"] >= outer["left"] - slack
        and inner["right"] <= outer["right"] + slack
        and inner["top"] >= outer["top"] - slack
        and inner["bottom"] <= outer["bottom"] + slack
    )


def check_whole(page: Page, file: Path) -> None:
    """Only the file itself was asked for, the console is empty, and nothing is wider than the window."""
    outside = [address for address in page.requests if not address.startswith("data:")]
    assert set(outside) == {file.as_uri()} and page.messages == []
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth"), page.evaluate(CUT)
    assert page.evaluate(CUT) == []


def train(ranks: Ranks, tiny: Path, folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    common = ["train.steps=24", "validation.interval=6", "checkpoint.interval=8", "schedule.warmup_steps=2"]
    return ranks.train(1, tiny, [*common, *overrides], folder, name)


def values(rows: list[dict[str, Any]], field: str) -> list[float]:
    return [row[field] for row in rows if field in row]


def test_two_trained_runs(
    ranks: Ranks, tiny: Path, page: Page, tmp_path: Path, shot: Callable[[Page, str], None]
) -> None:
    rows = {"quick": train(ranks, tiny, tmp_path, "quick", "optimizer.learning_rate=3e-3")}
    rows["slow"] = train(ranks, tiny, tmp_path, "slow", "optimizer.learning_rate=1e-4", "train.steps=18")
    file = write(tmp_path / "quick", tmp_path / "slow", output=tmp_path / "both.html")
    for width in WIDTHS:
        page.open(file, width)
        found = charts(page)
        check_whole(page, file)
        shot(page, str(width))
    assert set(found) == {
        "Loss over steps",
        "Loss over tokens",
        "Validation bits per byte",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Peak memory",
    }
    for title in ("Loss over steps", "Loss over tokens"):
        quick, slow, *held = found[title]["lines"]
        for line, name in ((quick, "quick"), (slow, "slow")):
            losses = values(rows[name], "loss")
            assert len(line["places"]) == len(losses) == (24 if name == "quick" else 18)
            check_heights(line["places"], losses)
        assert [line["markers"] for line in held] == [4, 3]
        assert quick["color"] == held[0]["color"] != slow["color"] == held[1]["color"]
        # The run whose loss is higher is drawn higher up, and the one that stopped earlier ends earlier.
        assert slow["places"][-1][1] < quick["places"][-1][1] and slow["places"][-1][0] < quick["places"][-1][0]
    words = [text["text"] for text in found["Loss over steps"]["texts"]]
    assert {"quick", "slow", "quick, heldout", "slow, heldout"} <= set(words)
    rate = found["Learning rate"]["lines"][0]["places"]
    check_heights(rate, values(rows["quick"], "learning_rate"))
    told = page.evaluate("document.body.innerText")
    assert "optimizer.learning_rate" in told and "finished at step 18" in told


def check_heights(places: list[list[float]], numbers: list[float]) -> None:
    """Places run to the right in equal steps, and upwards as the numbers do; pixels count from the top."""
    wide = [b[0] - a[0] for a, b in pairwise(places)]
    assert max(wide) - min(wide) < 1e-3 < min(wide)
    low, high = min(range(len(numbers)), key=numbers.__getitem__), max(range(len(numbers)), key=numbers.__getitem__)
    scale = (places[high][1] - places[low][1]) / (numbers[high] - numbers[low])
    assert scale < 0
    for (_, y), number in zip(places, numbers, strict=True):
        assert abs(y - places[low][1] - scale * (number - numbers[low])) < 0.01


def test_everything_a_run_may_hold(
    make_run: Maker,  # noqa: F811
    page: Page,
    tmp_path: Path,
    shot: Callable[[Page, str], None],
) -> None:
    run = make_run("a run of a rather long name with_underscores_and-no-place-to-break-it-anywhere", steps=3000)
    with (run / "metrics.jsonl").open("a") as file:
        for step in (1000, 2000, 3000):
            scores = {"acc": 0.2 + step / 1e4, "acc_stderr": 0.01}
            file.write(
                json.dumps({"step": step, "evaluation": {"piqa": scores, "arc_easy": scores, "seconds": 3.0}}) + "\n"
            )
        file.write(
            json.dumps({"step": 1500, "event": "skipped", "samples": list(range(60)), "reason": "x" * 200}) + "\n"
        )
    baselines = {name: {"bits_per_byte": 2.0 + i} for i, name in enumerate(("gzip -9", "bzip2 -9", "xz -9"))}
    heldout = {"bits_per_byte": 1.9, "baselines": baselines, "documents": 7, "bytes": 2048, "tokens": 900}
    (run / "heldout.json").write_text(json.dumps(heldout))
    (run / "sample.txt").write_text("word " * 300 + "\n" + "unbroken" * 60)
    picture(run / "samples.png")
    output = write(run, output=tmp_path / "one.html")
    for width in WIDTHS:
        page.open(output, width)
        found = charts(page)
        check_whole(page, output)
        shot(page, str(width))
    assert {"Evaluation acc", "Loss over steps"} <= set(found)
    assert [line["markers"] for line in found["Evaluation acc"]["lines"]] == [3, 3]
    assert page.evaluate("[...document.images].map(i => i.naturalWidth)") == [512]
    bars = page.evaluate("[...document.querySelectorAll('.bar')].map(b => b.getBoundingClientRect().width)")
    assert len(bars) == 4 and bars == sorted(bars) and bars[-1] == pytest.approx(bars[0] * 4.0 / 1.9, rel=0.02)


def picture(file: Path) -> None:
    from matplotlib.figure import Figure

    Figure(figsize=(5.12, 5.12), dpi=100, facecolor="#4080a0").savefig(file)


def test_light_and_dark(make_run: Maker, page: Page, tmp_path: Path, shot: Callable[[Page, str], None]) -> None:  # noqa: F811
    output = write(make_run("made"), output=tmp_path / "one.html")
    inks = {}
    for scheme in ("light", "dark"):
        page.open(output, 1280, scheme=scheme)
        back = brightness(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        found = charts(page)
        for chart in found.values():
            assert abs(brightness(chart["ink"]) - back) > 0.6
            for line in chart["lines"]:
                assert abs(brightness(line["color"]) - back) > 0.2, line["color"]
        inks[scheme] = brightness(found["Learning rate"]["ink"])
        shot(page, scheme)
    assert inks["light"] < 0.3 < 0.7 < inks["dark"]


def brightness(color: str) -> float:
    """0 to 1, of rgb(r, g, b)."""
    red, green, blue = (float(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255
