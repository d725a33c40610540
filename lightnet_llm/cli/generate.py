"""``lightnet generate``: continue a prompt, many prompts from a file, or what is typed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UserError
from .output import replacing, writable

if TYPE_CHECKING:
    from ..inference import Loaded, Sampling


def _prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from --prompt, from standard input (``-``) or from a file."""
    if file is None and prompt != "-":
        return prompt or ""
    return _decoded(file or "standard input", Path(file) if file else None)


def _decoded(name: str, path: Path | None) -> str:
    """A UTF-8 file, or standard input."""
    try:
        data = path.read_bytes() if path else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}; convert it, for example with iconv") from None
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror}); give an existing text file") from None


def _prompts(file: str) -> list[str]:
    """One prompt a line: in ``.jsonl`` files the field "prompt" (or a string), else the line itself."""
    # At line feeds alone: a text may hold other characters that Python takes for ends of lines.
    lines = [line.removesuffix("\r") for line in _decoded(file, Path(file)).removesuffix("\n").split("\n")]
    lines = [] if lines == [""] else lines
    if not file.endswith((".jsonl", ".ndjson")):
        found = lines
    else:
        found = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise UserError(f"{file}, line {number}: not JSON ({error}); give an object with a 'prompt'") from None
            text = value.get("prompt") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise UserError(f"{file}, line {number}: has no string 'prompt'; give an object with one")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError(f"{file}, line {number}: its 'prompt' holds half a character; give whole ones")
            found.append(text)
    if not found:
        raise UserError(f"{file}: holds no prompt; give one a line")
    return found


@click.command()
@click.argument("checkpoint", metavar="SOURCE")
@click.option("--prompt", metavar="TEXT", help="Text to continue; may be empty; - reads standard input.")
@click.option("--prompt-file", metavar="FILE", help="Read the prompt from a UTF-8 file.")
@click.option("--prompts", metavar="FILE", help="A prompt a line (.jsonl: its field 'prompt'); answers are JSON lines.")
@click.option("--interactive", is_flag=True, help="Ask for prompts. [default where there is a terminal and no prompt]")
@click.option("--max-tokens", type=click.IntRange(min=0), default=256, show_default=True, help="Tokens at most.")
@click.option("--greedy", is_flag=True, help="Always take the most likely token.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0 is greedy, above 1 flatter.")
@click.option("--top-k", type=int, help="Draw from the K most likely tokens.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Draw from the likeliest tokens that hold P.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="With --prompts: a string that ends a text; repeatable.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="--prompts at a time.")
@click.option(
    "--state", metavar="FILE", help="Go on from a state that --save-state wrote, as if its text stood before."
)
@click.option("--save-state", metavar="FILE", help="Keep the state after prompt and text.")
@click.option("--echo", is_flag=True, help="Print the prompt before its continuation.")
@click.option("--output", metavar="FILE", help="Write the answers of --prompts there.")
@click.option(
    "--weights", default="trained", show_default=True, metavar="trained|ema", help="ema: the average of train.ema."
)
@click.option("--device", help="cpu, cuda or cuda:N. [default: cuda where there is one]")
@click.option("--dtype", help="fp32 or bf16. [default: as trained; fp32 on the CPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done, instead of streaming text.")
def generate(
    checkpoint: str,
    prompt: str | None,
    prompt_file: str | None,
    prompts: str | None,
    interactive: bool,
    max_tokens: int,
    greedy: bool,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    batch_size: int,
    state: str | None,
    save_state: str | None,
    echo: bool,
    output: str | None,
    weights: str,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Continue texts with SOURCE: a run folder, a checkpoint of any layout, or a Hugging Face folder.

    A prompt is read in parallel, then one token at a time is drawn from a state of constant size, until the model ends
    the document or --max-tokens is reached. The text goes to standard output.
    """
    from ..inference import Sampling, load_model

    sampling = Sampling(greedy, temperature, top_k, top_p, seed)
    given = sum([prompt is not None, prompt_file is not None, prompts is not None, interactive])
    if not given and sys.stdin.isatty():
        interactive, given = True, 1
    if given != 1:
        raise UserError(
            "give either --prompt TEXT (- reads standard input), --prompt-file FILE, --prompts FILE or --interactive"
        )
    single = prompt is not None or prompt_file is not None
    for name, value, fits in (
        ("--state", state, single),
        ("--save-state", save_state, single),
        ("--stop", stop, prompts is not None),
        ("--output", output, prompts is not None),
        ("--echo", echo, single),
    ):
        if value and not fits:
            goes = "--prompts" if name in ("--stop", "--output") else "--prompt or --prompt-file"
            raise UserError(f"{name} goes with {goes}")
    writable("--save-state", save_state)
    target = writable("--output", output)
    if prompts is not None:
        texts = _prompts(prompts)
        _many(load_model(checkpoint, device, dtype, weights), texts, max_tokens, sampling, stop, batch_size, target)
    elif interactive:
        _ask(load_model(checkpoint, device, dtype, weights), max_tokens, sampling)
    else:
        text = _prompt(prompt, prompt_file)
        loaded = load_model(checkpoint, device, dtype, weights)
        _one(loaded, text, max_tokens, sampling, state, save_state, echo, as_json)


def _one(
    loaded: Loaded,
    text: str,
    max_tokens: int,
    sampling: Sampling,
    state: str | None,
    save_state: str | None,
    echo: bool,
    as_json: bool,
) -> None:
    """One prompt; its text as it is drawn, or JSON."""
    from ..inference import StateCache, TextStream
    from ..inference.load import require_tokenizer

    before = None if state is None else StateCache.load(state, loaded.model)
    stream = TextStream(loaded.model, require_tokenizer(loaded), text, max_tokens, sampling, before)
    start = time.perf_counter()
    if as_json:
        continuation = "".join(stream)
        seconds = time.perf_counter() - start
        facts = {
            "checkpoint": str(loaded.folder),
            "prompt": text,
            "text": continuation,
            "prompt_ids": stream.prompt_ids,
            "ids": stream.ids,
            "end": "end_of_document" if stream.ended else "max_tokens",
            "seed": sampling.seed,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(len(stream.ids) / seconds, 1) if seconds else None,
        }
        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        if echo:
            sys.stdout.buffer.write(text.encode())
        _write(stream)
    if save_state is not None:
        stream.cache().save(save_state, loaded.model)


def _write(pieces: Iterator[str] | Any) -> None:
    """Pieces of a text to standard output as they come, and a newline; UTF-8 whatever the locale says."""
    out = sys.stdout.buffer
    try:
        for piece in pieces:
            out.write(piece.encode())
            out.flush()
        out.write(b"\n")
        out.flush()
    except KeyboardInterrupt:
        out.write(b"\n")
        sys.exit(130)


def _many(
    loaded: Loaded,
    texts: list[str],
    max_tokens: int,
    sampling: Sampling,
    stop: tuple[str, ...],
    batch_size: int,
    target: Path | None,
) -> None:
    """All prompts in batches, and a JSON line for each, in their order."""
    from tqdm import tqdm

    from ..inference import after_document_end, complete
    from ..inference.load import require_tokenizer

    tokenizer = require_tokenizer(loaded)
    ids = [after_document_end(tokenizer.encode(text), tokenizer.eod_id) for text in texts]
    with tqdm(total=len(ids), file=sys.stderr, delay=1, leave=False, desc="generate") as bar:
        found = complete(
            loaded.model, tokenizer, ids, max_tokens, sampling, stop=stop, batch_size=batch_size, progress=bar.update
        )
    lines = []
    for text, prompt_ids, item in zip(texts, ids, found, strict=True):
        facts = {"prompt": text, "text": item.text, "prompt_tokens": len(prompt_ids), "ids": item.ids, "end": item.end}
        lines.append(json.dumps(facts, ensure_ascii=False) + "\n")
    if target is not None:
        with replacing(target) as partial:
            partial.write_text("".join(lines), encoding="utf-8")
    else:
        sys.stdout.buffer.write("".join(lines).encode())
        sys.stdout.buffer.flush()


def _ask(loaded: Loaded, max_tokens: int, sampling: Sampling) -> None:
    """Prompts as they are typed. A line goes on where the text before it ended: the state has all of it."""
    from ..inference import StateCache, TextStream
    from ..inference.load import require_tokenizer

    tokenizer = require_tokenizer(loaded)
    click.echo(
        "A line is a prompt, and goes on the text so far; an empty line begins a new text; Ctrl-D ends.", err=True
    )
    state: StateCache | None = None
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            click.echo(err=True)
            return
        if not line:
            state = None
            continue
        stream = TextStream(loaded.model, tokenizer, line, max_tokens, sampling, state)
        _write(stream)
        state = None if stream.ended else stream.cache()
