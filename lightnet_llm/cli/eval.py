"""``lightnet eval``: held-out loss of a checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from ..errors import UserError


@click.command("eval")
@click.argument("checkpoint")
@click.option("--data", metavar="DIR|PREFIX", help="Prepared data. [default: held-out split of the run's data.path]")
@click.option(
    "--text", metavar="FILE|FOLDER", help="Raw text instead: .jsonl holds a document a line, else a file is one."
)
@click.option(
    "--batch-tokens", type=click.IntRange(min=1), metavar="N", help="Tokens a pass; the result stays the same."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Score only the first N documents.")
@click.option("--baselines", is_flag=True, help="Also report gzip -9 and xz -9 on the same text.")
@click.option("--device", help="cpu, cuda or cuda:N. [default: cuda where there is one]")
@click.option("--dtype", help="fp32 or bf16. [default: as trained; fp32 on the CPU]")
@click.option(
    "--output", metavar="FILE", help="Write the JSON there too; RUN/heldout.json is shown by lightnet report."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and only that, on standard output.")
def eval_(
    checkpoint: str,
    data: str | None,
    text: str | None,
    batch_tokens: int | None,
    limit: int | None,
    baselines: bool,
    device: str | None,
    dtype: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Measure CHECKPOINT (a run folder or one of its steps) on held-out documents.

    Every document starts afresh; each of its tokens and its closing end-of-document token is predicted once from all
    that came before. Reported: nats per token, bits per byte, perplexity per token and per word.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # imports in half the time; nothing is compiled here
    if data is not None and text is not None:
        raise UserError("--data and --text were both given; choose one")
    target = _writable(output)

    from lightnet_eval.baselines import Baselines
    from lightnet_eval.documents import from_text, prepared
    from lightnet_eval.heldout import score
    from tqdm import tqdm

    from ..inference import load_model
    from ..inference.load import require_tokenizer

    loaded = load_model(checkpoint, device, dtype)
    if text is not None:
        source = from_text(text, require_tokenizer(loaded), lambda line: click.echo(f"left out: {line}", err=True))
    else:
        place = data or loaded.config.data.path
        if place is None:
            raise UserError(f"{loaded.folder}: its configuration names no data.path; give --data or --text")
        source = prepared(place, require_tokenizer(loaded) if baselines else loaded.tokenizer)
    compressors = Baselines() if baselines else None
    documents = itertools.islice(source.documents, limit)
    start = time.perf_counter()
    total = source.total_bytes if limit is None else None
    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, delay=1, leave=False, desc="eval") as bar:
        watched = compressors.watch(documents) if compressors else documents
        result = score(loaded.model, watched, source.eod_id, batch_tokens, bar.update)
    seconds = time.perf_counter() - start
    facts: dict[str, Any] = {
        "checkpoint": str(loaded.folder),
        "data": source.name,
        **result.as_dict(),
        "baselines": compressors.finish() if compressors else None,
        "device": str(next(loaded.model.parameters()).device),
        "dtype": str(loaded.model.embedding.weight.dtype).removeprefix("torch."),
        "seconds": round(seconds, 3),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if result.unfaithful:
        click.echo(
            f"warning: {result.unfaithful} of {facts['documents']} documents do not decode to their text; words and "
            "baselines are those of the decoded text: use --text",
            err=True,
        )
    if target is not None:
        partial = target.with_name(f".{target.name}.partial")
        partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        partial.replace(target)
    click.echo(json.dumps(facts) if as_json else _table(facts))


def _writable(output: str | None) -> Path | None:
    """Refuse a bad --output before the work, not after it."""
    if output is None:
        return None
    target = Path(output)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise UserError(f"--output {target}: must be a file in an existing folder")
    return target


def _table(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['checkpoint']} on {facts['data']}: {facts['documents']:,} documents, {facts['bytes']:,} bytes",
        f"  {facts['nats_per_token']:.4f} nats a token, perplexity {facts['perplexity']:.3f} "
        f"({facts['tokens']:,} tokens, one end-of-document token a document included)",
    ]
    if facts["bits_per_byte"] is not None:
        lines.append(f"  {facts['bits_per_byte']:.4f} bits per byte (ends of documents included)")
    for name, baseline in (facts["baselines"] or {}).items():
        lines.append(f"  {baseline['bits_per_byte']:.4f} bits per byte for {name} ({baseline['bytes']:,} bytes)")
    if facts["words"]:
        lines.append(
            f"  word perplexity {facts['word_perplexity']:.3f} ({facts['words']:,} words between white space); "
            f"{facts['word_perplexity_line_ends']:.3f} when every line end is a word too, as WikiText counts"
        )
    lines.append(f"  {facts['seconds']} s on {facts['device']} in {facts['dtype']}")
    return "\n".join(lines)
