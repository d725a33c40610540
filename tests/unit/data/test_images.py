"""``lightnet data images``: folders and tars to shards that WebDataset and our index read; bad images; interruptions."""

import gc
import io
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner, Result
from lightnet_data import image_sources, pictures, sample_shards
from lightnet_data.errors import DataError
from lightnet_data.sample_shards import SampleStore
from PIL import Image

from lightnet_llm.cli import main

CLASSES = ("bird", "cat", "dog")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["data", *map(str, arguments)], catch_exceptions=False)


def picture(number: int, size: tuple[int, int] = (40, 30), mode: str = "RGB", kind: str = "PNG") -> bytes:
    shape = (size[1], size[0], {"RGB": 3, "RGBA": 4, "CMYK": 4, "LA": 2, "L": 1, "I;16": 1}[mode])
    values = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    else:
        image = Image.fromarray(values.squeeze(), mode=mode)
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def images_of(split: str) -> dict[str, bytes]:
    """Name to bytes of 12 images of three classes, one suffix lying."""
    found = {f"{CLASSES[i % 3]}/{split}{i}.png": picture(i if split == "train" else 100 + i) for i in range(11)}
    found[f"cat/{split}-x.JPEG"] = picture(50 if split == "train" else 150, kind="JPEG")
    return found


def as_folder(place: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    return place


def as_tar(place: Path, content: dict[str, bytes]) -> Path:
    with tarfile.open(place, "w") as archive:
        for name, data in content.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return place


def as_tar_of_tars(place: Path, content: dict[str, bytes]) -> Path:
    inner = {}
    for label in CLASSES:
        own = {Path(name).name: data for name, data in content.items() if name.startswith(label)}
        inner[f"{label}.tar"] = as_tar(place.with_name("inner.tar"), own).read_bytes()
    return as_tar(place, inner)


def as_shards(place: Path, content: dict[str, bytes]) -> Path:
    """WebDataset's: KEY.png, KEY.cls and KEY.json; the class before or behind the image."""
    place.mkdir()
    for number in range(2):
        members: dict[str, bytes] = {}
        for i, (name, data) in enumerate([*content.items()][number::2]):
            key, label = f"part.of/{number:02d}{i:04d}_{Path(name).stem}", name.split("/")[0].encode()
            members |= {f"{key}.json": b"{}", f"{key}.cls": label} if number else {f"{key}{Path(name).suffix}": data}
            members |= {f"{key}{Path(name).suffix}": data} if number else {f"{key}.cls": label + b"\n"}
        as_tar(place / f"x-{number:06d}.tar", members)
    return place


FORMS: dict[str, Callable[[Path, dict[str, bytes]], Path]] = {
    "folder": lambda place, content: as_folder(place / "tree", content),
    "tar": lambda place, content: as_tar(place / "a.tar", {f"top/{name}": data for name, data in content.items()}),
    "tar of tars": lambda place, content: as_tar_of_tars(place / "b.tar", content),
    "shards": lambda place, content: as_shards(place / "shards", content),
}


def stored(folder: Path, split: str) -> dict[bytes, str]:
    store = SampleStore(folder, split)
    names = sample_shards.class_names(folder)
    return {data: names[label] for data, label in map(store.read, range(len(store)))}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_and_classes_are_kept(form: str, workers: int, tmp_path: Path) -> None:
    content = images_of("train")
    place = FORMS[form](tmp_path, content)
    result = run("images", place, "--output", tmp_path / "out", "--workers", workers, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert stored(tmp_path / "out", "train") == {data: name.split("/")[0] for name, data in content.items()}
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == {"bird": 0, "cat": 1, "dog": 2}
    split = facts["splits"]["train"]
    assert split["class_counts"] == [4, 5, 3] and split["samples"] == facts["samples"] == 12
    assert split["sizes"]["width"] == {"min": 40, "median": 40, "mean": 40, "max": 40}
    assert split["sizes"]["height"]["max"] == 30 and split["bytes"] == sum(map(len, content.values()))
    assert run("verify", tmp_path / "out").exit_code == 0
    assert not (tmp_path / "out.partial").exists()


def test_webdataset_reads_the_same(tmp_path: Path) -> None:
    import webdataset

    content = images_of("train")
    as_folder(tmp_path / "tree", content)
    assert run("images", tmp_path / "tree", "--output", tmp_path / "out").exit_code == 0
    shards = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    read = list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False))
    store = SampleStore(tmp_path / "out", "train")
    assert len(read) == 12
    for number, sample in enumerate(read):
        facts = json.loads(sample["json"])
        data = sample["jpg" if facts["name"].endswith("JPEG") else "png"]
        assert (data, int(sample["cls"])) == store.read(number) and data == content[facts["name"]]
        assert sample["__key__"] == f"{number:09d}"


def test_the_same_work_gives_the_same_bytes(tmp_path: Path) -> None:
    as_folder(tmp_path / "tree", images_of("train"))
    for name, more in (("a", []), ("b", ["--workers", "2"]), ("c", ["--seed", "1"])):
        assert run("images", tmp_path / "tree", "--output", tmp_path / name, *more).exit_code == 0
    a, b, c = ((tmp_path / name / "train-000000.tar").read_bytes() for name in "abc")
    assert a == b and a != c
    labels = SampleStore(tmp_path / "a", "train").labels.tolist()
    assert labels != sorted(labels)


def test_splits_share_their_classes(tmp_path: Path) -> None:
    as_folder(tmp_path / "set" / "train", images_of("train"))
    as_folder(tmp_path / "set" / "val", {k: v for k, v in images_of("val").items() if "bird" not in k})
    assert run("images", tmp_path / "set", "--output", tmp_path / "out").exit_code == 0
    assert set(stored(tmp_path / "out", "validation").values()) == {"cat", "dog"}
    flat = {Path(name).name: data for name, data in images_of("test").items()}
    tar = as_tar(tmp_path / "flat.tar", flat)
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"{Path(name).name} {name.split('/')[0]}\n" for name in images_of("test")))
    arguments = [f"test={tar}", "--labels", labels, "--classes", tmp_path / "out", "--output", tmp_path / "more"]
    result = run("images", *arguments)
    assert result.exit_code == 0, result.output
    assert stored(tmp_path / "more", "test") == {data: name.split("/")[0] for name, data in images_of("test").items()}


def test_classes_that_are_not_there(tmp_path: Path) -> None:
    """Not even where a classes.json lies beside what was named."""
    as_folder(tmp_path / "tree", images_of("train"))
    (tmp_path / "classes.json").write_text('{"bird": 0, "cat": 1, "dog": 2}')
    (tmp_path / "other.json").write_text("{}")
    for name in ("nowhere", "tree", "other.json", "tree/classes.json"):
        given = ["--classes", tmp_path / name, "--output", tmp_path / "out"]
        result = run("images", tmp_path / "tree", *given)
        assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
        assert f"--classes {tmp_path / name}: no folder with a classes.json" in result.stderr
        assert not (tmp_path / "out").exists()
    for name in ("", "classes.json"):
        given = ["--classes", tmp_path / name, "--output", tmp_path / f"out{name}"]
        assert run("images", tmp_path / "tree", *given).exit_code == 0


def test_classes_of_shards_that_are_numbers(tmp_path: Path) -> None:
    """They keep them, and what was made is read again by its splits' names alone."""
    content = {f"{number}/{number}.png": picture(number, (20, 20)) for number in range(12)}
    assert run("images", as_shards(tmp_path / "shards", content), "--output", tmp_path / "out").exit_code == 0
    store = SampleStore(tmp_path / "out", "train")
    found = dict(map(store.read, range(len(store))))
    assert found == {data: int(name.split("/")[0]) for name, data in content.items()}
    result = run("images", tmp_path / "out", "--output", tmp_path / "more")
    assert result.exit_code == 1 and "no image in it" in result.stderr
    again = run("images", f"train={tmp_path / 'out' / 'train-000000.tar'}", "--output", tmp_path / "more")
    assert again.exit_code == 0 and stored(tmp_path / "more", "train") == stored(tmp_path / "out", "train")


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ({"a.png": picture(0), "a.cls": b"\xff"}, "a.cls holds no class"),
        ({"a.png": picture(0), "a.cls": b" "}, "a.cls holds no class"),
        (
            {"a.png": picture(0), "a.cls": b"1", "b.png": picture(1)},
            "b.png is in no class folder; move it into one, or",
        ),
        ({"a.cls": b"1", "a.json": b"{}"}, "no image in it (found: 1 .json)"),
    ],
)
def test_shards_that_are_refused(members: dict[str, bytes], what: str, tmp_path: Path) -> None:
    result = run("images", as_tar(tmp_path / "x.tar", members), "--output", tmp_path / "out")
    assert result.exit_code == 1 and what in result.stderr and len(result.stderr.splitlines()) == 1


def test_hold_out_is_a_function_of_the_bytes(tmp_path: Path) -> None:
    content = {f"{CLASSES[i % 3]}/{i}.png": picture(i, (20, 20)) for i in range(60)}
    content |= {f"dog/copy{i}.png": data for i, data in enumerate([*content.values()][:30])}
    as_folder(tmp_path / "tree", content)
    assert run("images", tmp_path / "tree", "--output", tmp_path / "out", "--holdout", "0.3").exit_code == 0
    train, held = stored(tmp_path / "out", "train"), stored(tmp_path / "out", "validation")
    assert not train.keys() & held.keys() and len(train) + len(held) == 60 and 8 <= len(held) <= 30


def test_shards_of_a_size(tmp_path: Path) -> None:
    content = {f"{CLASSES[i % 3]}/{i}.png": picture(i, (300, 300)) for i in range(12)}  # 270 kB each
    as_folder(tmp_path / "tree", content)
    assert run("images", tmp_path / "tree", "--output", tmp_path / "out", "--shard-size", 1).exit_code == 0
    assert len(list((tmp_path / "out").glob("*.tar"))) == 3
    assert len(stored(tmp_path / "out", "train")) == 12
    assert run("verify", tmp_path / "out").exit_code == 0


def test_resized(tmp_path: Path) -> None:
    content = {
        "a/wide.png": picture(0, (200, 100)),
        "a/tall.jpg": picture(1, (64, 96), kind="JPEG"),
        "a/s.png": picture(2),
    }
    as_folder(tmp_path / "tree", content)
    assert run("images", tmp_path / "tree", "--output", tmp_path / "out", "--resize", 50).exit_code == 0
    sizes = {pictures.decode(data).size for data in stored(tmp_path / "out", "train")}
    assert sizes == {(100, 50), (50, 75), (40, 30)}
    assert content["a/s.png"] in stored(tmp_path / "out", "train")


def film() -> bytes:
    frames, buffer = [Image.new("RGB", (20, 20), color) for color in ("red", "blue")], io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


BAD = {
    "cut": (picture(0)[:-60], "corrupt", "cannot be decoded"),
    "no image": (b"words", "corrupt", "cannot be decoded (cannot identify image file)"),
    "empty": (b"", "corrupt", "cannot be decoded"),
    "grey": (picture(0, mode="L"), "channels", "1 channel (mode L)"),
    "transparent": (picture(0, mode="RGBA"), "channels", "4 channels (mode RGBA)"),
    "CMYK": (picture(0, mode="CMYK", kind="JPEG"), "channels", "4 channels (mode CMYK)"),
    "tiny": (picture(0, (15, 40)), "tiny", "15 x 40 pixels, smaller than 16"),
    "film": (film(), "frames", "2 frames, not one image; mend it, or leave"),
}


def test_a_bad_image_behind_good_ones_says_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard that was begun is given up: Python would print what fails when it collects it."""
    unraised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    with pytest.raises(ZeroDivisionError), sample_shards.SampleWriter(tmp_path, "train") as writer:
        writer.add("png", picture(0), 0, {})
        raise ZeroDivisionError
    del writer
    gc.collect()
    assert not unraised


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", BAD)
def test_bad_images(kind: str, form: str, tmp_path: Path) -> None:
    data, group, what = BAD[kind]
    content = {**images_of("train"), "dog/bad.png": data, "dog/worse.png": data}
    place = FORMS[form](tmp_path, content)
    result = run("images", place, "--output", tmp_path / "out")
    assert result.exit_code == 1 and what in result.stderr and "--skip-bad" in result.stderr
    assert ("bad.png" in result.stderr or "worse.png" in result.stderr) and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    result = run("images", place, "--output", tmp_path / "out", "--skip-bad")
    assert result.exit_code == 0 and f"skipped, {group}: 2 (first: " in result.stdout
    assert len(stored(tmp_path / "out", "train")) == 12
    if group == "channels":
        assert run("images", place, "--output", tmp_path / "all", "--convert").exit_code == 0
        assert data in stored(tmp_path / "all", "train")
        assert pictures.decode(data).mode == "RGB"


def test_transparent_over_white_and_16_bits() -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (20, 20), (255, 0, 0, 0)).save(buffer, "PNG")
    assert pictures.decode(buffer.getvalue()).getpixel((3, 3)) == (255, 255, 255)
    deep = np.asarray(pictures.decode(picture(3, mode="I;16")))
    expected = np.random.default_rng(3).integers(0, 256, (30, 40, 1), dtype=np.uint8)
    assert np.abs(deep.astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("content", "arguments", "what"),
    [
        ({"a.png": picture(0)}, [], "in no class folder"),
        ({"x.txt": b"x"}, [], "no image in it (found: 1 .txt)"),
        ({"a/x.png": picture(0), "b/x.txt": b""}, [], "class folder without an image"),
        ({"a/x.png": picture(0)}, ["--holdout", "1"], "--holdout 1.0"),
        ({"a/x.png": picture(0)}, ["--resize", "3"], "min-size <= resize"),
        ({"a/x.png": picture(0)}, ["--workers", "0"], "--workers 0"),
        ({"train/a/x.png": picture(0), "val/b/y.png": picture(1)}, [], "class 'b' of validation is not in train"),
        (
            {"train/a/x.png": picture(0), "val/a/y.png": picture(1), "kit/z.txt": b""},
            [],
            "holds splits and others (kit)",
        ),
    ],
)
def test_what_is_refused(content: dict[str, bytes], arguments: list[str], what: str, tmp_path: Path) -> None:
    as_folder(tmp_path / "tree", content)
    result = run("images", tmp_path / "tree", "--output", tmp_path / "out", *arguments)
    assert result.exit_code == 1 and what in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_link_that_goes_round(tmp_path: Path) -> None:
    as_folder(tmp_path / "tree", images_of("train"))
    (tmp_path / "tree" / "cat" / "all").symlink_to(tmp_path / "tree")
    result = run("images", tmp_path / "tree", "--output", tmp_path / "out")
    assert result.exit_code == 1 and "a link to a folder that is read already" in result.stderr


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("a.png cat\n\nb c.png dog\n", {"a.png": "cat", "b c.png": "dog"}),
        ("a.png,cat\nb.png, dog", {"a.png": "cat", "b.png": "dog"}),
        ("a.png cat\na.png dog\n", "line 2: 'a.png dog' (is named twice)"),
        ("a.png\n", "line 1: 'a.png' (a line is FILE CLASS)"),
    ],
)
def test_labels(lines: str, expected: dict[str, str] | str, tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text(lines)
    if isinstance(expected, dict):
        assert image_sources.read_labels(tmp_path / "l.txt") == expected
    else:
        with pytest.raises(DataError) as error:
            image_sources.read_labels(tmp_path / "l.txt")
        assert str(error.value) == f"{tmp_path / 'l.txt'}: {expected}"


def test_damaged_tars_and_taken_outputs(tmp_path: Path) -> None:
    whole = as_tar_of_tars(tmp_path / "b.tar", images_of("train")).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "not.tar").write_bytes(b"x" * 2000)
    for name in ("cut.tar", "not.tar"):
        result = run("images", tmp_path / name, "--output", tmp_path / "out")
        assert result.exit_code == 1 and name in result.stderr and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    empty = as_tar(tmp_path / "d.tar", {"cat.tar": whole[:0] + as_tar(tmp_path / "e.tar", {}).read_bytes()})
    assert "cat.tar is a class without an image" in run("images", empty, "--output", tmp_path / "o").stderr
    assert "exists; choose another" in run("images", tmp_path / "b.tar", "--output", tmp_path / "out").stderr
    assert "no such file" in run("images", tmp_path / "nowhere", "--output", tmp_path / "o").stderr


@pytest.mark.parametrize("damage", ["index", "label", "moved", "unlisted"])
def test_verify_finds(damage: str, tmp_path: Path) -> None:
    as_folder(tmp_path / "tree", images_of("train"))
    out = tmp_path / "out"
    assert run("images", tmp_path / "tree", "--output", out).exit_code == 0
    if damage == "unlisted":
        (out / "notes.txt").touch()
        result = run("verify", out)
        assert result.exit_code == 0 and "note: " in result.stderr and "notes.txt" in result.stderr
        return
    index = np.load(out / "train.index.npy")
    if damage == "index":
        index = index[:-1]
    elif damage == "label":
        index[0, 3] = (index[0, 3] + 1) % 3
    else:
        index[2, 1] += 512
    np.save(out / "train.index.npy", index)
    written = json.loads((out / "manifest.json").read_text())
    assert run("verify", out).exit_code == 1
    import hashlib

    path = out / "train.index.npy"
    entry = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    written["files"][path.name] = entry
    (out / "manifest.json").write_text(json.dumps(written))
    result = run("verify", out)
    expected = {
        "index": "11 samples, the manifest says 12",
        "label": "the index says",
        "moved": "not where the index says",
    }
    assert result.exit_code == 1 and expected[damage] in result.stderr


def test_inspected(tmp_path: Path) -> None:
    as_folder(tmp_path / "tree", images_of("train"))
    assert run("images", tmp_path / "tree", "--output", tmp_path / "out").exit_code == 0
    result = run("inspect", tmp_path / "out", "--output", tmp_path / "sheet.png")
    assert result.exit_code == 0 and "cat: 5" in result.stdout
    assert Image.open(tmp_path / "sheet.png").size[0] > 1000
    assert json.loads(run("inspect", tmp_path / "out", "--json").stdout)["class_names"] == list(CLASSES)


def test_items_of_a_tar_are_ranges_of_it(tmp_path: Path) -> None:
    content = images_of("train")
    for place in (as_tar(tmp_path / "a.tar", content), as_tar_of_tars(tmp_path / "b.tar", content)):
        items = image_sources.listing(place).items
        assert sorted(item.read() for item in items) == sorted(content.values())
        assert [item.name for item in items] == sorted(item.name for item in items)


# The command line in a process of its own, each image slowed.
SLOWLY = """
import sys, time
from lightnet_data import pictures
from lightnet_llm.cli import main
original = pictures.check
def slowly(*arguments):
    time.sleep(0.05)
    return original(*arguments)
pictures.check = slowly
main(sys.argv[1:])
"""


@pytest.mark.parametrize("which", ["the command", "a worker"])
def test_killed_and_run_again(which: str, tmp_path: Path) -> None:
    """Nothing is left that looks whole, no worker outlives the command, and the next run is as if nothing had been."""
    content = {f"{CLASSES[i % 3]}/{i}.png": picture(i) for i in range(300)}
    given = ["images", as_folder(tmp_path / "in", content), "--workers", 2]
    assert run(*given, "--output", tmp_path / "whole").exit_code == 0
    command = [sys.executable, "-c", SLOWLY, "data", *map(str, given), "--output", f"{tmp_path}/out"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    tar = tmp_path / "out.partial" / "out" / "train-000000.tar"
    while not tar.is_file() or len(psutil.Process(process.pid).children()) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children()
    if which == "a worker":
        workers[0].kill()
        message = process.communicate(timeout=120)[1]
        assert (
            process.returncode == 1 and message.startswith("error: a worker process died") and message.count("\n") == 1
        )
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == []
    else:
        process.kill()
        process.wait()
        assert not psutil.wait_procs(workers, timeout=60)[1]
        assert not (tmp_path / "out").exists()
        assert "no manifest" in run("verify", tmp_path / "out.partial").output
    again = run(*given, "--output", tmp_path / "out")
    assert again.exit_code == 0, again.stderr
    for path in (tmp_path / "whole").iterdir():
        if path.name != "manifest.json":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "out.partial").exists()
