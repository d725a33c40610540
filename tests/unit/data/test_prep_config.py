"""One YAML file for a preparation: the same result as options, overrides, and refusals in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from lightnet_data import manifest
from lightnet_data.options import Options

from lightnet_llm.cli.prep import _configured
from lightnet_llm.config.prep import load_prep

Run = Callable[..., Result]


@pytest.fixture
def config(tmp_path: Path, corpus: Path, tokenizer_file: Path) -> Path:
    path = tmp_path / "prep.yaml"
    path.write_text(
        f"inputs: ['{corpus}']\noutput: {tmp_path}/out\ntokenizer: {{path: {tokenizer_file}}}\n"
        "write: {holdout: 0.2, shard_tokens: 3000}\nselect: {min_chars: 10}\nexecutor: {workers: 2}\n"
    )
    return path


def test_equals_the_options(tmp_path: Path, corpus: Path, run_prep: Run, config: Path, tokenizer_file: Path) -> None:
    assert run_prep("--config", config).exit_code == 0
    options = ["--holdout", 0.2, "--shard-tokens", 3000, "--min-chars", 10, "--tokenizer", tokenizer_file]
    assert run_prep(corpus, "--output", tmp_path / "options", *options).exit_code == 0
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "options" / path.name).read_bytes()


def test_overrides(tmp_path: Path, run_prep: Run, config: Path) -> None:
    more = [f"output={tmp_path}/other", "write.seed=3", "select.min_chars=null", "executor.workers=1"]
    result = run_prep("--config", config, *more, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["request"]["seed"] == 3
    assert manifest.load(tmp_path / "other")["request"]["min_chars"] is None


def test_every_option_has_its_place(config: Path) -> None:
    """A field of Options that the file cannot set, or a default of its own, would be met here."""
    bare = config.with_name("bare.yaml")
    bare.write_text("inputs: [a]\noutput: b\n")
    *_, chosen, execution = _configured(str(bare), (), False)
    assert Options(**chosen) == Options() and execution == {"kind": "local", "workers": 1, "settings": {}}


def test_executors_share_the_file(config: Path) -> None:
    given = ("executor.kind=slurm", "executor.settings.partition=cpu", "executor.settings.time='24:00:00'")
    executor = load_prep(str(config), given).executor
    assert executor.settings == {"partition": "cpu", "time": "24:00:00"} and executor.workers == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["select.min_char=3"], "unknown key 'select.min_char'"),
        (["executor.kind=cloud"], "'executor.kind' is 'cloud'"),
        (["executor.workers=many"], "'executor.workers' is 'many'"),
        (["more.txt"], "override 'more.txt' is not of the form key=value"),
        (["inputs=[]"], "no INPUT given"),
        (["--output", "x"], "--output does not go with --config; give KEY=VALUE"),
        (["--workers", "2"], "--workers does not go with --config"),
    ],
)
def test_refusals(run_prep: Run, config: Path, arguments: list[str], message: str) -> None:
    result = run_prep("--config", config, *arguments)
    assert result.exit_code != 0 and message in result.stderr
    assert not (config.parent / "out").exists()


def test_no_such_file(run_prep: Run) -> None:
    result = run_prep("--config", "no/such.yaml")
    assert result.exit_code == 1 and result.stderr.startswith("error: no/such.yaml: no such file")


def test_output_is_asked_for(run_prep: Run, corpus: Path) -> None:
    assert "--output" in run_prep(corpus).stderr
