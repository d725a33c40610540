"""``lightnet generate``: continue a prompt."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

from ..errors import UserError


def _prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from --prompt, from standard input (``-``) or from a file."""
    if (prompt is None) == (file is None):
        raise UserError("give either --prompt TEXT (- reads standard input) or --prompt-file FILE")
    if file is None and prompt != "-":
        return prompt or ""
    name = file or "standard input"
    try:
        data = Path(file).read_bytes() if file else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}; convert it, for example with iconv") from None
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror}); give an existing text file") from None


@click.command()
@click.argument("checkpoint")
@click.option("--prompt", metavar="TEXT", help="Text to continue; may be empty; - reads standard input.")
@click.option("--prompt-file", metavar="FILE", help="Read the prompt from a UTF-8 file.")
@click.option("--max-tokens", type=click.IntRange(min=0), default=256, show_default=True, help="Tokens at most.")
@click.option("--greedy", is_flag=True, help="Always take the most likely token.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0 is greedy, above 1 flatter.")
@click.option("--top-k", type=int, help="Draw from the K most likely tokens.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Draw from the likeliest tokens that hold P.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--echo", is_flag=True, help="Print the prompt before its continuation.")
@click.option("--device", help="cpu, cuda or cuda:N. [default: cuda where there is one]")
@click.option("--dtype", help="fp32 or bf16. [default: as trained; fp32 on the CPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done, instead of streaming text.")
def generate(
    checkpoint: str,
    prompt: str | None,
    prompt_file: str | None,
    max_tokens: int,
    greedy: bool,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    echo: bool,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Continue a prompt with CHECKPOINT (a run folder or one of its steps); the text goes to standard output.

    The prompt is read in parallel, then one token at a time is drawn from a state of constant size, until the model
    ends the document or --max-tokens is reached.
    """
    from ..inference import Sampling, TextStream, load_model
    from ..inference.load import require_tokenizer

    sampling = Sampling(greedy, temperature, top_k, top_p, seed)
    text = _prompt(prompt, prompt_file)
    loaded = load_model(checkpoint, device, dtype)
    stream = TextStream(loaded.model, require_tokenizer(loaded), text, max_tokens, sampling)
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
            "seed": seed,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(len(stream.ids) / seconds, 1) if seconds else None,
        }
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    out = sys.stdout.buffer  # UTF-8 whatever the locale says
    if echo:
        out.write(text.encode())
    try:
        for piece in stream:
            out.write(piece.encode())
            out.flush()
        out.write(b"\n")
        out.flush()
    except KeyboardInterrupt:
        out.write(b"\n")
        sys.exit(130)
