"""The data sets of a run before it starts: short held-out splits, what a resume compares, tokenizers by URL."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from lightnet_data import manifest
from lightnet_data.errors import DataError
from lightnet_data.storage import indexed_dataset

from lightnet_llm.cli import main
from lightnet_llm.config import validate
from lightnet_llm.config.run import RunConfig
from lightnet_llm.errors import UserError
from lightnet_llm.training.data import check_sets, validation_prefixes
from lightnet_llm.training.run_folder import RunFolder

LENGTH = 16


def folder_of(folder: Path, **splits: int) -> Path:
    """A prepared folder with so many tokens in each split."""
    folder.mkdir(exist_ok=True)
    for name, tokens in splits.items():
        builder = indexed_dataset().IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        builder.add_document(np.append(np.ones(tokens - 1, dtype=np.uint16), 0), [tokens])
        builder.finalize(str(folder / f"{name}.idx"))
    facts = {"format": manifest.FORMAT, "format_version": manifest.FORMAT_VERSION}
    counts = {name: {"documents": 1, "tokens": tokens} for name, tokens in splits.items()}
    manifest.save(folder, {**facts, "tokenizer": {"vocab_size": 8, "eod_id": 0}, "splits": counts})
    return folder


def section(folder: Path, **data: Any) -> dict[str, Any]:
    model = {"layers": 1, "width": 16, "heads": 2, "glu_width": 16, "vocab_size": 8}
    train = {
        "steps": 4,
        "global_batch": 2,
        "micro_batch": 2,
        "name": "run",
        "output": str(folder / "runs"),
        "resume": "auto",
    }
    given = {"sequence_length": LENGTH, **data}
    return {"model": model, "train": train, "data": given, "validation": {"interval": 2, "samples": 2}}


def config_of(folder: Path, **data: Any) -> RunConfig:
    return validate(section(folder, **data), "run.yaml")


def dry_run(folder: Path, **data: Any) -> str:
    (folder / "run.yaml").write_text(yaml.safe_dump(section(folder, **data)))
    done = CliRunner().invoke(main, ["train", str(folder / "run.yaml"), "--dry-run", "--gpus", "1"])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_held_out_split_shorter_than_a_window_is_left_out(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "short", train=200, validation=LENGTH)
    long = folder_of(tmp_path / "long", train=200, validation=LENGTH + 1)
    notes: list[str] = []
    check_sets(config_of(tmp_path, path=str(path)), notes.append)
    assert notes == [
        f"{path}/validation: 16 tokens are fewer than data.sequence_length 16 + 1; it is left out of validation"
    ]
    mixture = {name: {"path": str(tmp_path / name), "weight": 1} for name in ("short", "long")}
    assert validation_prefixes(config_of(tmp_path, mixture=mixture)) == {"long": f"{long}/validation"}
    assert "would not start" not in dry_run(tmp_path, path=str(path))
    named = {"path": str(long), "validation": {"mine": str(path)}}
    with pytest.raises(DataError, match="16 tokens are fewer than sequence_length 16"):
        check_sets(config_of(tmp_path, **named))
    assert "would not start: " + f"{path}/validation: 16 tokens are fewer" in dry_run(tmp_path, **named)


def test_a_validation_set_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path, other = (folder_of(tmp_path / name, train=200, validation=100) for name in ("one", "two"))
    named = {"path": str(path), "validation": {"mine": str(other)}}
    assert "would not start" not in dry_run(tmp_path, **named)
    facts = manifest.load(other)
    manifest.save(other, {**facts, "tokenizer": {**facts["tokenizer"], "fingerprint": "b" * 64}})
    with pytest.raises(UserError, match=rf"^data\.validation\.mine {other}: cut with another tokenizer"):
        check_sets(config_of(tmp_path, **named))
    assert "would not start: data.validation.mine " in dry_run(tmp_path, **named)
    (other / manifest.FILE_NAME).unlink()  # of another stack, which does not say
    check_sets(config_of(tmp_path, **named))


def test_nothing_to_validate_is_said(tmp_path: Path) -> None:
    notes: list[str] = []
    check_sets(config_of(tmp_path, path=str(folder_of(tmp_path / "data", train=200))), notes.append)
    assert notes == ["there is no held-out split and no data.validation: nothing will be validated"]


def test_tasks_that_cannot_run_are_found_by_a_dry_run(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "data", train=200, validation=100)
    (tmp_path / "data" / "tokenizer.model").touch()
    given = {
        **section(tmp_path, path=str(path)),
        "evaluation": {"interval": 1, "tasks": ["arc"], "offline": str(tmp_path / "no")},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    done = CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml"), "--dry-run", "--gpus", "1"])
    assert done.exit_code == 0 and "would not start: " in done.output and str(tmp_path / "no") in done.output


def test_a_resumed_run_keeps_its_weights_and_stages(tmp_path: Path) -> None:
    """Whichever of them change; and what a source without weight holds is no part of the run."""
    for name, tokens in (("web", 200), ("books", 300), ("none", 100)):
        folder_of(tmp_path / name, train=tokens)

    def mixed(web: float, later: list[tuple[int, float]], **more: float) -> RunConfig:
        weights = {"web": web, "books": 1.0, "none": 0, **more}
        mixture = {name: {"path": str(tmp_path / name), "weight": weight} for name, weight in weights.items()}
        stages = [{"from_tokens": LENGTH * start, "weights": {"web": w, "books": 1}} for start, w in later]
        return config_of(tmp_path, mixture=mixture, stages=stages)

    before = mixed(3.0, [(4, 1.0), (6, 2.0)])
    RunFolder(before).record({}, None)
    (RunFolder(before).checkpoints / "step_00000001").mkdir(parents=True)
    RunFolder(before).check()
    for field, changed in {
        "data.mixture.web.weight": mixed(2.0, [(4, 1.0), (6, 2.0)]),
        "data.mixture.none.weight": mixed(3.0, [(4, 1.0), (6, 2.0)], none=1.0),
        "data.stages": mixed(3.0, [(4, 1.5), (6, 2.0)]),
    }.items():
        with pytest.raises(UserError, match=f"^{field} was .* a resumed run keeps it"):
            RunFolder(changed).check()
    for later in ([(4, 1.0)], [(4, 1.0), (5, 2.0)], []):
        with pytest.raises(UserError, match=r"^data\.stages was "):
            RunFolder(mixed(3.0, later)).check()
    identity = check_sets(before)
    assert identity["tokens"] == 500 and identity["sources"] == {"books": 300, "web": 200}
    folder_of(tmp_path / "none", train=150)
    assert check_sets(before) == identity
    folder_of(tmp_path / "web", train=250)
    assert check_sets(before) != identity


COPIES = """
import sys
from lightnet_llm.training.sources import Source, tokenizer_file
source = Source("data.path", sys.argv[1], "train", {"file": "tokenizer.model"})
files = [tokenizer_file(source) for _ in range(3)]
assert files[0].read_bytes() == b"a tokenizer" and (files[0].parent / "manifest.json").is_file()
print(len(set(files)), files[0])
"""


def test_a_tokenizer_by_url_is_copied_once_and_goes_at_the_end(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", train=50)
    (folder / "tokenizer.model").write_bytes(b"a tokenizer")
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", COPIES, f"file://{folder}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    count, _, file = done.stdout.strip().partition(" ")
    assert count == "1" and file.startswith(str(tmp_path / "tmp"))
    assert not list((tmp_path / "tmp").glob("lightnet-tokenizer-*"))
