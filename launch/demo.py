"""The demo: prepare a corpus, train on every rank there is, stop, resume, score held-out text, sample, draw the report.

``make demo``, or ``python launch/demo.py [--corpus PATH]``, runs the ``lightnet`` commands a user would type, prints
each with the time it took, and leaves ``runs/demo/report.html``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
MARKER = "demo.json"  # in folders that the demo made, and may therefore replace
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3"}  # of the standard library
HELD_OUT_BYTES = 400_000  # enough for a steady figure, and scored in seconds
DOCUMENT = 8_000  # characters of the documents that one plain text file is cut into
SHORTEST = 32  # tokens of a training window, at least
EPOCHS = 8  # passes over a small corpus, at most
GRACE = 60  # seconds that a stopped step may take to save
PROMPT = 'import sys\n\n\ndef main(argv=None):\n    """'


def fail(message: str, code: int = 1) -> NoReturn:
    """End with one line for the user and an exit code."""
    print(f"demo: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


# Steps ----------------------------------------------------------------------------------------------------------------
class Interrupted(Exception):
    """A signal asked the demo to end; its argument is the signal's number."""


def _interrupt(number: int, _frame: object) -> NoReturn:
    for other in SIGNALS:  # what follows is the clean-up, which a second signal must not leave half done
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def step(title: str, times: dict[str, float]) -> Iterator[None]:
    """Print a heading, and the time that what follows took."""
    print(f"\n== {title}", flush=True)
    start = time.monotonic()
    yield
    times[title] = time.monotonic() - start
    print(f"-- {times[title]:.1f} s", flush=True)


def lightnet(
    *arguments: str,
    shown: str | None = None,
    output: Any = None,
    threads: int | None = None,
    stop_when: Callable[[], bool] | None = None,
) -> None:
    """Run ``lightnet ARGUMENTS``; a failure ends the demo with the command's exit code, and nothing of it stays behind.

    Args:
        shown: printed in place of the arguments.
        output: open file for standard output.
        threads: of each process of the command.
        stop_when: polled; once it is true the command is sent SIGTERM, and still has to end with exit code 0.
    """
    print(f"$ lightnet {shown or shlex.join(arguments)}", flush=True)
    environment = {"PYTHONWARNINGS": "ignore::UserWarning"} | os.environ  # megatron-core's, on what it does without
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    command = [str(Path(sys.executable).with_name("lightnet")), *arguments]
    process = subprocess.Popen(command, stdout=output, env=environment, start_new_session=True)
    try:
        while process.poll() is None:
            if stop_when is not None and stop_when():
                print("\n-- SIGTERM to the running training, as a cluster does: it saves and ends", flush=True)
                process.terminate()
                stop_when = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
    finally:
        for _ in range(2):  # lightnet train saves at the first signal and kills its ranks at the second
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        fail(f"`lightnet {arguments[0]}` failed; its own message stands above", max(process.returncode, 1))


# The corpus -----------------------------------------------------------------------------------------------------------
def standard_library() -> list[Path]:
    """The Python sources of this machine's standard library, pydoc_data/topics.py (Python's manual) among them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(root).parts)]
    if not files:
        fail(f"{root} holds no Python sources; give a text of your own: --corpus PATH (make demo CORPUS=PATH)")
    return sorted(files)


def cut(path: Path, target: Path) -> Path:
    """One plain text as JSON lines of documents that end where a line does, so that some can be held out."""
    try:
        text = path.read_bytes().decode("utf-8")  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        fail(f"corpus {path}: cannot be read as UTF-8 text ({error})")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        start = 0
        while start < len(text):
            end = start + DOCUMENT
            if end < len(text):
                end = text.rfind("\n", start, end) + 1 or end
            file.write(json.dumps({"text": text[start:end]}) + "\n")
            start = end
    return target


def prepare(corpus: Path | None, data: Path, vocabulary: int) -> dict[str, Any]:
    """Token shards in ``data``, unless they are there already and of these very files; returns their manifest."""
    if corpus is None:
        inputs, name = standard_library(), f"the standard library of Python {sys.version.split()[0]}, without its tests"
    elif corpus.is_file() and corpus.suffix not in (".jsonl", ".gz", ".zst"):
        inputs, name = [cut(corpus, data.with_name(data.name + "-corpus.jsonl"))], f"{corpus}, cut into documents"
    else:
        inputs, name = [corpus], str(corpus)
    files = [f for path in inputs for f in (sorted(path.rglob("*")) if path.is_dir() else [path]) if f.is_file()]
    size = sum(file.stat().st_size for file in files)
    print(f"corpus: {name}: {len(files):,} file(s), {size / 1e6:.1f} MB", flush=True)

    holdout = min(0.1, HELD_OUT_BYTES / max(size, 1))
    workers = min(cores(), 1 + size // 50_000_000)  # starting one takes longer than encoding some megabytes
    options = ["--output", str(data), "--holdout", f"{holdout:.4f}", "--skip-bad", "--workers", str(workers)]
    if size > 2000 * vocabulary:  # for less, lightnet prep finds the vocabulary that suits
        options += ["--vocab-size", str(vocabulary)]
    digest = hashlib.sha256(json.dumps(options).encode())
    for file in files:
        digest.update(str(file).encode() + b"\0" + file.read_bytes())
    marker = data / MARKER
    if marker.is_file():
        if json.loads(marker.read_text())["digest"] == digest.hexdigest():
            print(f"{data} is made of exactly these files; used again", flush=True)
            return json.loads((data / "manifest.json").read_text())
        options.append("--overwrite")
    more = f"... ({len(inputs)} files) " if len(inputs) > 1 else ""
    lightnet("prep", *map(str, inputs), *options, shown=f"prep {inputs[0]} {more}{shlex.join(options)}")
    marker.write_text(json.dumps({"digest": digest.hexdigest()}) + "\n")
    return json.loads((data / "manifest.json").read_text())


# The run --------------------------------------------------------------------------------------------------------------
def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fitted(config: Any, manifest: dict[str, Any]) -> list[str]:
    """Overrides that fit the configuration to the corpus and to the GPUs of this machine."""
    import torch

    splits = manifest["splits"]
    train, held = (splits.get(name, {}).get("tokens", 0) for name in ("train", "validation"))
    if not held:
        fail("the corpus is a single document, so none can be held out; give a folder, JSON lines or a longer text")
    window = config.data.sequence_length
    while window > SHORTEST and window >= min(train, held):
        window //= 2
    if window >= min(train, held):
        fail(f"too little text: {train} tokens to train on and {held} held out; each needs more than {SHORTEST}")
    overrides = [f"model.vocab_size={manifest['tokenizer']['vocab_size']}", f"data.sequence_length={window}"]
    batch = config.train.global_batch
    gpus = torch.cuda.device_count()
    if gpus:
        batch = config.train.micro_batch * gpus
        overrides += ["parallel.tensor=1", "train.precision=bf16", f"train.global_batch={batch}"]
    most = max(40, EPOCHS * train // (batch * window))
    if most < config.train.steps:
        overrides += [f"train.steps={most}", f"schedule.warmup_steps={min(config.schedule.warmup_steps, most // 5)}"]
    return overrides


def claim(run: Path) -> None:
    """An empty run folder: an earlier demo's is removed, anything else is left alone."""
    if (run / MARKER).is_file():
        print(f"removing the earlier demo in {run}: this is a fresh run", flush=True)
        shutil.rmtree(run)
    elif run.is_dir() and any(run.iterdir()):
        fail(f"{run} was not made by the demo and is left alone; move it, or give another --output")
    run.mkdir(parents=True, exist_ok=True)
    (run / MARKER).write_text(json.dumps({"started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n")


def rows(run: Path) -> list[dict[str, Any]]:
    """Whole lines of the run's metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def demo(given: argparse.Namespace) -> None:
    """All steps."""
    from lightnet_llm.config import load_config
    from lightnet_llm.errors import UserError

    start, times, run = time.monotonic(), dict[str, float](), given.output
    try:
        config = load_config(str(given.config), given.set)
        if given.corpus is not None and not given.corpus.exists():
            fail(f"corpus {given.corpus}: no such file or folder")  # before anything of an earlier run is removed
        claim(run)
        with step("prepare the corpus", times):
            manifest = prepare(given.corpus, given.data, config.model.vocab_size)
        places = [f"data.path={given.data}", f"train.output={run.parent}", f"train.name={run.name}"]
        overrides = [*places, *fitted(config, manifest), *given.set, "train.resume=auto"]
        total = load_config(str(given.config), overrides).train.steps or 1
    except UserError as error:
        fail(str(error))

    train = ["train", str(given.config), *overrides]
    threads = max(1, min(4, cores() // 2))
    with step(f"train, and stop at about step {total // 2} of {total}", times):
        lightnet(*train, threads=threads, stop_when=lambda: any(row["step"] >= total // 2 for row in rows(run)))
    with step("resume with the same command, to the end", times):
        lightnet(*train, threads=threads)
    with step("score the held-out documents, beside gzip and xz", times):
        lightnet("eval", str(run), "--baselines", "--output", str(run / "heldout.json"))
    with step("sample", times), (run / "sample.txt").open("wb") as file:
        prompt = PROMPT if given.corpus is None else ""
        drawing = ["--max-tokens", "300", "--temperature", "0.8", "--top-p", "0.95"]
        lightnet("generate", str(run), "--prompt", prompt, "--echo", *drawing, output=file)
    with step("draw the report", times):
        lightnet("report", str(run))

    held = json.loads((run / "heldout.json").read_text())
    scores = {"this model": held["bits_per_byte"]} | {k: v["bits_per_byte"] for k, v in held["baselines"].items()}
    events = ", ".join(f"{row['event']} at step {row['step']}" for row in rows(run) if "event" in row)
    print(f"\n== done in {time.monotonic() - start:.0f} s")
    for name, seconds in times.items():
        print(f"{seconds:6.1f} s  {name}")
    print(f"events: {events}")
    print("held-out bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    print(f"report: {run / 'report.html'}")


def main() -> None:
    """Parse and run; a signal ends the step at work first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="your own text file, JSON lines or folder")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="run folder, replaced if a demo made it")
    parser.add_argument("--data", type=Path, default=Path("data/demo"), help="folder for the prepared tokens")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/demo/demo.yaml", help="configuration of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override for the training")
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    try:
        demo(parser.parse_args())
    except Interrupted as stop:
        fail("stopped; nothing is left running", 128 + stop.args[0])


if __name__ == "__main__":
    main()
