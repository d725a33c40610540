"""Packed tar shards: the samples of .bin/.idx, from a folder or by URL; a changed byte is noticed."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data import manifest, remote, webdataset_tokens
from lightnet_data.dataset import PackedTokens, collate
from lightnet_data.documents import DocumentReader
from lightnet_data.errors import DataError
from lightnet_data.sampler import GlobalBatchSampler

from .conftest import EOD, write_shards
from .serving import Ranges, serve

LENGTH = 16


def pack(prefix: Path, output: Path, length: int = LENGTH, samples_per_shard: int = 40) -> Path:
    """A folder of packed shards with its manifest."""
    output.mkdir()
    entry = webdataset_tokens.write(prefix, output, length, samples_per_shard)
    facts = {"format": manifest.FORMAT, "format_version": manifest.FORMAT_VERSION, "tokenizer": {"eod_id": EOD}}
    manifest.save(output, {**facts, "splits": {"train": {"tokens": entry["tokens"], "webdataset": entry}}})
    return output


def equal(left: PackedTokens, right: PackedTokens, positions: range) -> bool:
    samples = zip(left.__getitems__(positions), right.__getitems__(positions), strict=True)
    return all(np.array_equal(a[key], b[key]) for a, b in samples for key in a)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """.bin/.idx and the same packed in four shards."""
    folder, draw = tmp_path_factory.mktemp("packed"), np.random.default_rng(5)
    documents = [draw.integers(2, 60_000, size=int(n)).tolist() for n in draw.integers(0, 50, size=90)]
    write_shards(folder / "train", documents)
    return folder / "train", pack(folder / "train", folder / "tar")


@pytest.fixture
def server(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "PAUSES", [0.01] * 8)
    with serve(both[1].parent) as url:
        yield f"{url}/tar"


def test_a_folder_reads_as_the_shards_it_was_made_from(both: tuple[Path, Path]) -> None:
    plain, packed = PackedTokens(both[0], LENGTH, seed=3), PackedTokens(both[1] / "train", LENGTH, seed=3)
    packed.windows.check(checksums=True)
    assert len(sorted(both[1].glob("*.tar"))) == -(-len(plain) // 40) > 2
    assert (packed.tokens, len(packed), packed.dropped_tokens) == (plain.tokens, len(plain), plain.dropped_tokens)
    assert equal(plain, packed, range(3 * len(plain)))
    assert equal(plain, pickle.loads(pickle.dumps(packed)), range(5))


@pytest.mark.parametrize("kind", ["file", "memory", "http", "simplecache"])
def test_urls(kind: str, both: tuple[Path, Path], server: str) -> None:
    if kind == "memory":
        system = fsspec.filesystem("memory")
        for path in both[1].iterdir():
            system.pipe_file(f"/corpus/{path.name}", path.read_bytes())
    url = {
        "file": f"file://{both[1]}",
        "memory": "memory://corpus",
        "http": server,
        "simplecache": f"simplecache::{server}",
    }[kind]
    plain, packed = PackedTokens(both[0], LENGTH, seed=1), PackedTokens(f"{url}/train", LENGTH, seed=1)
    packed.windows.check()
    assert equal(plain, packed, range(60))
    loader = torch.utils.data.DataLoader(  # workers open connections of their own
        packed,
        batch_sampler=GlobalBatchSampler(8, 4, 1, 2, end_step=6),
        collate_fn=collate,
        num_workers=2 if kind != "simplecache" else 0,
    )
    for batch, positions in zip(loader, GlobalBatchSampler(8, 4, 1, 2, end_step=6), strict=True):
        expected = collate([plain[position] for position in positions])
        assert all(torch.equal(batch[key], expected[key]) for key in batch)


@given(st.lists(st.integers(0, 40), min_size=3, max_size=12), st.integers(1, 70), st.integers(1, 9), st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_lengths(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, samples: int, wide: bool
) -> None:
    folder, first = tmp_path_factory.mktemp("any"), 70_000 if wide else 2
    from lightnet_data.storage import indexed_dataset

    builder = indexed_dataset().IndexedDatasetBuilder(f"{folder}/train.bin", dtype=np.int32 if wide else np.uint16)
    for size in lengths:
        builder.add_document(np.array([*range(first, first + size), EOD]), [size + 1])
    builder.finalize(f"{folder}/train.idx")
    if sum(lengths) + len(lengths) < length + 1:
        with pytest.raises(DataError, match="fewer than sequence length"):
            webdataset_tokens.write(folder / "train", folder, length, samples)
        return
    pack(folder / "train", folder / "tar", length, samples)
    plain, packed = PackedTokens(folder / "train", length), PackedTokens(folder / "tar" / "train", length)
    packed.windows.check(checksums=True)
    assert equal(plain, packed, range(2 * len(plain)))


def test_the_webdataset_library_reads_them(both: tuple[Path, Path]) -> None:
    webdataset = pytest.importorskip("webdataset")
    files = sorted(map(str, both[1].glob("*.tar")))
    read = list(webdataset.WebDataset(files, shardshuffle=False).decode())
    plain = PackedTokens(both[0], LENGTH, shuffle=False)
    assert len(read) == len(plain)
    for sample, expected in zip(read, plain, strict=True):
        assert sample["tokens.npy"].tolist() == [*expected["input_ids"], expected["labels"][-1]]
        starts = np.unpackbits(sample["boundaries.npy"], count=LENGTH).astype(bool)
        assert np.array_equal(starts, expected["segment_starts"])


def test_the_index_of_member_offsets(both: tuple[Path, Path]) -> None:
    import tarfile

    packed = manifest.load(both[1])["splits"]["train"]["webdataset"]
    with tarfile.open(both[1] / packed["shards"][1]["file"]) as archive:
        members = archive.getmembers()
    for number, member in enumerate(members):
        entry = packed["members"][member.name.partition(".")[2]]
        data = number // 2 * packed["stride"] + entry["offset"]
        assert data + entry["bytes"] == member.offset_data + member.size
        assert member.name.startswith(f"{40 + number // 2:012d}-")


def test_writing_again_gives_the_same_bytes(both: tuple[Path, Path], tmp_path: Path) -> None:
    pack(both[0], tmp_path / "again")
    for path in both[1].iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def edit(folder: Path, change: Any) -> None:
    facts = json.loads((folder / "manifest.json").read_text())
    change(facts["splits"]["train"]["webdataset"])
    (folder / "manifest.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("damage", "opening", "reading"),
    [
        (
            lambda d: (d / "train-000001.tar").unlink(),
            "train-000001.tar: no such file",
            "train-000001.tar: no such file",
        ),
        (lambda d: cut(d / "train-000000.tar"), r"train-000000.tar: \d+ bytes, the manifest says \d+", "it is cut"),
        (
            lambda d: flip(d / "train-000000.tar", 660),
            r"train-000000.tar: .*sha256",
            "sample 0 is not what was written",
        ),
        (lambda d: swap(d), r"train-000000.tar: .*sha256", "train-000000.tar: sample 0 is not what was written there"),
        (lambda d: edit(d, lambda p: p.update(samples=3)), r"lists \d+ samples of 3", None),
        (lambda d: edit(d, lambda p: p.pop("stride")), "its manifest is not whole", None),
        (lambda d: (d / "manifest.json").write_text("{"), "not a readable manifest", None),
    ],
)
def test_damage(damage: Any, opening: str, reading: str | None, both: tuple[Path, Path], tmp_path: Path) -> None:
    folder = pack(both[0], tmp_path / "tar")
    damage(folder)
    with pytest.raises(DataError, match=opening) as caught:
        PackedTokens(folder / "train", LENGTH).windows.check(checksums=True)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    if reading is not None:
        with pytest.raises(DataError, match=reading):
            list(PackedTokens(folder / "train", LENGTH, shuffle=False))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


def swap(folder: Path) -> None:
    first, second = folder / "train-000000.tar", folder / "train-000001.tar"
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def test_refusals(both: tuple[Path, Path], tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"packed at 16 tokens, not 32; set data\.sequence_length=16"):
        PackedTokens(both[1] / "train", 32)
    with pytest.raises(DataError, match="end-of-document token is 1, not 7"):
        PackedTokens(both[1] / "train", LENGTH, eod_id=7)
    with pytest.raises(DataError, match=r"test\.idx: no such file"):
        PackedTokens(both[1] / "test", LENGTH)
    with pytest.raises(DataError, match="no packed samples"):
        PackedTokens(f"file://{both[1]}/test", LENGTH)
    with pytest.raises(DataError, match="no manifest"):
        PackedTokens(f"file://{tmp_path}/train", LENGTH)
    with pytest.raises(DataError, match=r"nowhere://x/manifest\.json: cannot read it|Protocol not known: nowhere"):
        PackedTokens("nowhere://x/train", LENGTH)
    with pytest.raises(DataError, match="holds packed samples, without documents"):
        DocumentReader(both[1] / "train")
    with pytest.raises(DataError, match="both must be at least 1"):
        webdataset_tokens.write(both[0], tmp_path, 0)
    monkeypatch.setattr(Ranges, "gives_ranges", False)
    with pytest.raises(DataError, match="its server gives no ranges of bytes"):
        PackedTokens(f"{server}/train", LENGTH)[0]


def test_prep_writes_them(run_prep: Callable[..., Result], corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    """The samples of --format webdataset are those of .bin/.idx, whatever the size of shards; nothing else is left."""
    common = [corpus, "--tokenizer", tokenizer_file, "--holdout", 0.2]
    assert run_prep(*common, "--output", tmp_path / "plain").exit_code == 0
    packing = ["--format", "webdataset", "--sequence-length", 32, "--shard-tokens", 4000]
    result = run_prep(*common, "--output", tmp_path / "packed", *packing)
    assert result.exit_code == 0, result.output
    for split in ("train", "validation"):
        plain, packed = (
            PackedTokens(tmp_path / "plain" / split, 32, 1),
            PackedTokens(tmp_path / "packed" / split, 32, 1),
        )
        assert equal(plain, packed, range(2 * len(plain)))
    written = manifest.load(tmp_path / "packed")
    files = {path.name for path in (tmp_path / "packed").iterdir()}
    assert files == {"manifest.json", *written["files"]} and len(list((tmp_path / "packed").glob("train-*.tar"))) > 2
    before = {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()}
    again = run_prep(*common, "--output", tmp_path / "packed", *packing)
    assert again.exit_code == 0 and "nothing to do" in again.output
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()}
    for wrong, message in (
        (["--format", "webdataset"], "--format webdataset and --sequence-length go together"),
        (["--sequence-length", 32], "--format webdataset and --sequence-length go together"),
        (["--format", "webdataset", "--sequence-length", 0], "--sequence-length 0: must be at least 1"),
        (["--format", "webdataset", "--sequence-length", 10**6], "the train split has"),
    ):
        result = run_prep(*common, "--output", tmp_path / "wrong", *wrong)
        assert result.exit_code == 1 and message in result.output and not (tmp_path / "wrong").exists()
