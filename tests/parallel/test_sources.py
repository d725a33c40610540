"""Runs on mixtures and on packed samples: the same steps from either format, on any ranks and workers, stopped or not."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightnet_data import manifest, webdataset_tokens
from lightnet_data.dataset import PackedTokens
from lightnet_data.storage import TokenStore, indexed_dataset

from tests.conftest import Ranks, steps_of
from tests.unit.data.serving import serve

from .test_resume import FIELDS, refusal

SHORT = ["train.steps=12", "train.resume=auto", "validation.interval=6"]


def prepared(folder: Path, source: Path, documents: range, shards: int, **tokenizer: Any) -> Path:
    """A folder with some documents of ``source`` in so many shards, and its held-out split."""
    store, stems = TokenStore(source / "train"), [f"train_{i:05d}-of-{shards:05d}" for i in range(shards)]
    folder.mkdir()
    for number, stem in enumerate(stems):
        builder = indexed_dataset().IndexedDatasetBuilder(str(folder / f"{stem}.bin"), dtype=np.uint16)
        for index in documents[len(documents) * number // shards : len(documents) * (number + 1) // shards]:
            builder.add_document(store.document(index), [len(store.document(index))])
        builder.finalize(str(folder / f"{stem}.idx"))
    for suffix in ("bin", "idx"):
        shutil.copyfile(source / f"validation.{suffix}", folder / f"validation.{suffix}")
    facts = manifest.load(source)
    tokens = int(sum(len(store.document(index)) for index in documents))
    facts["splits"]["train"] = {"documents": len(documents), "tokens": tokens, "bytes": 3 * tokens, "shards": stems}
    facts["tokenizer"] = {**facts["tokenizer"], **tokenizer}
    manifest.save(folder, facts)
    return folder


def packed(folder: Path, source: Path, length: int = 64) -> Path:
    """Another folder with all splits of ``source`` packed."""
    facts = manifest.load(source)
    folder.mkdir()
    for name in facts["splits"]:
        facts["splits"][name]["webdataset"] = webdataset_tokens.write(source / name, folder, length, 50)
        facts["splits"][name].pop("shards", None)
    manifest.save(folder, facts)
    return folder


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``web`` and ``books`` of several shards, ``all`` of both, and ``tar`` with the samples of ``all``."""
    root, source = tmp_path_factory.mktemp("sources"), tiny.parent / "data"
    prepared(root / "web", source, range(250), 3)
    prepared(root / "books", source, range(250, 400), 2)
    prepared(root / "all", source, range(400), 3)
    packed(root / "tar", root / "all")
    (root / "tar" / "tokenizer.model").write_bytes(b"a tokenizer")
    facts = manifest.load(root / "tar")
    facts["tokenizer"]["file"] = "tokenizer.model"
    manifest.save(root / "tar", facts)
    return root


@pytest.fixture(scope="module")
def plain(ranks: Ranks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The run on the single .bin/.idx pair that all the others must equal."""
    return ranks.train(1, tiny, SHORT, tmp_path_factory.mktemp("plain"), "plain")


def figures(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    return steps_of(rows, *FIELDS), [row for row in map(held_out, rows) if row["step"] % 6 == 0 and len(row) > 1]


def held_out(row: dict[str, Any]) -> dict[str, Any]:
    """A stop validates too; those of all runs are compared."""
    return {key: value for key, value in row.items() if key in ("step", "validation")}


def test_shards_give_the_run_of_one_file(
    plain: list[dict[str, Any]], ranks: Ranks, tiny: Path, folders: Path, tmp_path: Path
) -> None:
    """Three shards, two loader workers, stopped and resumed."""
    overrides = [*SHORT, f"data.path={folders / 'all'}", "data.workers=2"]
    for stop in (5, 12):
        rows = ranks.train(1, tiny, [*overrides, f"train.stop_at_step={stop}"], tmp_path, "run")
    assert figures(rows) == figures(plain)
    assert "data train (" in (tmp_path / "run.log.rank0").read_text()


def test_packed_samples_give_the_run_of_tokens(
    plain: list[dict[str, Any]], ranks: Ranks, tiny: Path, folders: Path, tmp_path: Path
) -> None:
    """From a folder, and streamed by URL with two workers, stopped and resumed: step for step, validation too."""
    rows = ranks.train(1, tiny, [*SHORT, f"data.path={folders / 'tar'}"], tmp_path, "folder")
    assert figures(rows) == figures(plain)
    pytest.importorskip("aiohttp")
    with serve(folders, fails_every=60) as url:
        overrides = [*SHORT, f"data.path={url}/tar", "data.workers=2"]
        for stop in (7, 12):
            rows = ranks.train(1, tiny, [*overrides, f"train.stop_at_step={stop}"], tmp_path, "url")
    assert figures(rows) == figures(plain)
    assert (tmp_path / "url" / "tokenizer.model").read_bytes() == b"a tokenizer"
    assert manifest.load(tmp_path / "url")["tokenizer"]["eod_id"] == 0


def mixture(folders: Path, first: tuple[float, float], second: tuple[float, float] | None = None) -> list[str]:
    """Overrides for a mixture whose weights change after 40 samples."""
    overrides = ["data.path=null"]
    for name, weight in zip(("web", "books"), first, strict=True):
        overrides += [f"data.mixture.{name}.path={folders / name}", f"data.mixture.{name}.weight={weight}"]
    if second is not None:
        weights = "{{web: {}, books: {}}}".format(*second)
        overrides += [f"data.stages=[{{from_tokens: {40 * 64}, weights: {weights}}}]"]
    return overrides


def test_a_staged_mixture_on_any_ranks_stopped_or_not(ranks: Ranks, tiny: Path, folders: Path, tmp_path: Path) -> None:
    overrides = [*SHORT, *mixture(folders, (0.8, 0.2), (0.1, 0.9))]
    whole = ranks.train(1, tiny, overrides, tmp_path, "whole")
    for stop, world in ((3, 2), (7, 1), (12, 2)):  # 24, 56 and 96 samples; the weights change at 40
        rows = ranks.train(
            world, tiny, [*overrides, f"train.stop_at_step={stop}", "data.workers=2"], tmp_path, "pieces"
        )
    samples, expected = steps_of(rows, "samples", "batch_checksum"), steps_of(whole, "samples", "batch_checksum")
    assert samples == expected and len(samples) == 12
    left, right = steps_of(rows, "loss"), steps_of(whole, "loss")
    assert all(abs(left[step][0] - right[step][0]) < 1e-5 for step in right)
    log = (tmp_path / "whole.log.rank0").read_text()
    books = PackedTokens(folders / "books" / "train", 64).samples_per_epoch
    assert f"data books ({folders / 'books'}/train): {59 * 64:,} tokens" in log  # 8 of 40, 51 of 56
    assert f"{59 / 96:.2%} of the run, {59 / books:.3g} epochs" in log
    names = {name for row in whole for name in row.get("validation", {})}
    assert names == {"web", "books"}


def test_a_source_without_weight_changes_nothing(
    plain: list[dict[str, Any]], ranks: Ranks, tiny: Path, folders: Path, tmp_path: Path
) -> None:
    """And a mixture of one source is that source."""
    overrides = ["data.path=null", f"data.mixture.all.path={folders / 'all'}", "data.mixture.all.weight=0.3"]
    overrides += [f"data.mixture.none.path={folders / 'books'}", "data.mixture.none.weight=0"]
    rows = ranks.train(1, tiny, [*SHORT, *overrides], tmp_path, "run")
    assert figures(rows)[0] == figures(plain)[0]
    assert {name for row in rows for name in row.get("validation", {})} == {"all"}


def test_a_run_is_not_resumed_in_another_order(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["train.steps=2", "train.resume=auto", "validation.interval=0"]
    ranks.train(1, tiny, [*overrides, "train.stop_at_step=1"], tmp_path, "run")
    path = tmp_path / "run" / "checkpoints" / "step_00000001" / "manifest.json"
    written = json.loads(path.read_text())
    assert written["data"]["order"] == 2
    del written["data"]["order"]  # as before orders were recorded
    path.write_text(json.dumps(written))
    message = refusal(ranks, tiny, tmp_path, overrides)
    assert "in another order (version 1, this is 2)" in message and "train.init_from=" in message


def test_what_is_refused_before_any_work(ranks: Ranks, tiny: Path, folders: Path, tmp_path: Path) -> None:
    def refused(*overrides: str) -> str:
        return refusal(ranks, tiny, tmp_path, ["train.steps=2", *overrides])

    mixed = mixture(folders, (1, 1))
    assert "packed at 64 tokens, not 32; set data.sequence_length=64" in refused(
        f"data.path={folders / 'tar'}", "data.sequence_length=32"
    )
    prepared(tmp_path / "other", tiny.parent / "data", range(100), 1, fingerprint="f00")
    message = refused(*mixed, f"data.mixture.books.path={tmp_path / 'other'}")
    assert "data.mixture.books.path" in message and "cut with another tokenizer (fingerprint f00)" in message
    message = refused(*mixed, "data.mixture.books.split=test")
    assert "data.mixture.books.path" in message and "no split 'test' in it, it has splits train, validation" in message
    assert "no subset 'Books'" in refused(*mixed, "data.mixture.books.subset=Books")
    assert "no such folder" in refused(*mixed, f"data.mixture.books.path={tmp_path / 'none'}")
    assert "share of 1e-07" in refused(*mixed, "data.mixture.books.weight=1e-7")
    broken = tmp_path / "broken"
    shutil.copytree(folders / "tar", broken)
    (broken / "train-000001.tar").unlink()
    assert "train-000001.tar: no such file" in refused(f"data.path={broken}")
