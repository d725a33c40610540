"""``lightnet data``: look at prepared data, verify it, and make shards of images and latents."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from .data_images import images, latents, vae
from .output import replacing, writable_picture
from .progress import bar


@click.group()
def data() -> None:
    """Verify and inspect prepared data; make shards of images and of their latents."""
    if "torch" not in sys.modules:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # a third of megatron-core's import; nothing is compiled here


@data.command()
@click.argument("folder", metavar="DIR")
@click.option(
    "--workers", type=click.IntRange(1), default=4, show_default=True, metavar="N", help="Files read at a time."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON, and only that, on stdout.")
def verify(folder: str, workers: int, as_json: bool) -> None:
    """Re-read everything in DIR against its manifest: sizes, checksums, indices, tokens, documents, counts.

    One line a problem; exit code 1 if there is any.
    """
    from lightnet_data.verify import total_bytes
    from lightnet_data.verify import verify as run

    with bar("verifying", total_bytes(folder), as_json) as update:
        findings = run(folder, workers, update)
    if as_json:
        found = {"problems": [vars(problem) for problem in findings.problems], "notes": findings.notes}
        click.echo(json.dumps({"folder": folder, "ok": not findings.problems, **found, "checked": findings.counts}))
    else:
        for note in findings.notes:
            click.echo(f"note: {note}", err=True)
        for problem in findings.problems:
            click.echo(f"error: {problem}", err=True)
        checked = ", ".join(f"{count:,} {name}" for name, count in sorted(findings.counts.items()))
        click.echo(f"{folder}: {len(findings.problems) or 'no'} problems; read {checked or 'nothing'}")
    sys.exit(1 if findings.problems else 0)


@data.command()
@click.argument("folder", metavar="DIR")
@click.option("--split", default="train", show_default=True, help="Whose documents.")
@click.option(
    "--documents", "first", type=click.IntRange(0), default=2, show_default=True, metavar="N", help="Show the first N."
)
@click.option("--random", "drawn", type=click.IntRange(0), default=0, metavar="N", help="Show N drawn with --seed.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of --random.")
@click.option("--index", "indices", type=int, multiple=True, metavar="I", help="Show document I (from 0); several are.")
@click.option(
    "--characters", type=click.IntRange(0), default=300, show_default=True, metavar="N", help="Of a shown document."
)
@click.option("--output", metavar="FILE.png", help="Draw lengths and fertility into a picture.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON, and only that, on stdout.")
def inspect(
    folder: str,
    split: str,
    first: int,
    drawn: int,
    seed: int,
    indices: tuple[int, ...],
    characters: int,
    output: str | None,
    as_json: bool,
) -> None:
    """Show what is in DIR: documents decoded, counts and fertility by subset, document lengths."""
    from lightnet_data import sample_shards
    from lightnet_data.inspection import inspect as run

    from .data_images import inspect_samples

    target = writable_picture("--output", output)
    if sample_shards.is_samples(folder):
        return inspect_samples(folder, split, seed, target, as_json)
    facts = run(folder, split, first, drawn, seed, indices)
    for document in facts["shown"]:
        document["shortened"] = len(document["text"]) > characters
        document["text"] = document["text"][:characters]
    if target is not None:
        from lightnet_data.inspection_picture import draw

        with replacing(target) as partial:
            draw(facts, partial)
        facts["picture"] = output
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        _print(facts)


def _print(facts: dict[str, Any]) -> None:
    if "picture" in facts:
        click.echo(facts["picture"])
    from lightnet_data.inspection_picture import terminal

    for document in facts["shown"]:
        head = f"{document['split']} {document['index']}: {document['tokens']:,} tokens, {document['bytes']:,} bytes"
        click.echo(f"--- {head}")
        click.echo(document["text"] + (" [...]" if document["shortened"] else ""))
    if facts["shown"]:
        click.echo("---")
    named = {**facts["splits"], **{f"  {name}": entry for name, entry in facts["subsets"].items()}, "all": facts}
    width = max(12, *map(len, named))
    click.echo(f"{'':<{width}} {'documents':>13} {'bytes':>17} {'tokens':>16} {'bytes/token':>12}")
    for name, entry in named.items():
        rate = "" if entry["bytes_per_token"] is None else f"{entry['bytes_per_token']:.3f}"
        counts = f"{entry['documents']:>13,} {entry['bytes']:>17,} {entry['tokens']:>16,}"
        click.echo(f"{name:<{width}} {counts} {rate:>12}")
    if not facts["lengths"]:
        click.echo(f"\n{facts['split']}: no documents to show; none are there, or it holds packed samples")
        return
    click.echo(f"\nlengths of documents, {facts['split']}:")
    for line in terminal(facts["lengths"]):
        click.echo(line)


data.add_command(images)
data.add_command(vae)
data.add_command(latents)
