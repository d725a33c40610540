"""``lightnet convert``: weights from one form into another."""

from __future__ import annotations

import json
import os

import click


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--to", required=True, metavar="hf|training|safetensors", help="What TARGET shall be.")
@click.option(
    "--dtype",
    metavar="D",
    help="float32, bfloat16 or float16. [default: as trained; float32 of a bf16 run are its master weights]",
)
@click.option(
    "--average", metavar="last:K|all", help="Take the mean of the run's last K checkpoints, or of all it kept."
)
@click.option(
    "--weights",
    default="trained",
    show_default=True,
    metavar="trained|ema",
    help="ema: the average that train.ema keeps.",
)
@click.option("--trust-pickle", is_flag=True, help="Read pickled files where there is nothing else; they may run code.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and only that, on standard output.")
def convert(
    source: str,
    target: str,
    to: str,
    dtype: str | None,
    average: str | None,
    weights: str,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Convert SOURCE (a run folder, a checkpoint of any layout, or a folder of an earlier conversion) into TARGET.

    hf: a Hugging Face folder with tokenizer, model card and code. training: a checkpoint for train.init_from, any layout.
    safetensors: plain weights under training's names. At the end logits of both are compared on real text.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # imports in half the time; nothing is compiled here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    from ..convert import convert as run

    report = run(source, target, to, dtype=dtype, average=average, weights=weights, trust_pickle=trust_pickle)
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
        return
    origin = report.source[0] if len(report.source) == 1 else f"mean of {len(report.source)} checkpoints"
    origin += ", exponential average" if weights == "ema" else ""
    click.echo(f"{origin} -> {report.target} ({report.to})")
    masters = " from fp32 master weights" if report.masters and weights == "trained" else ""
    click.echo(
        f"  {report.parameters:,} parameters in {report.tensors} tensors, {report.files} files, {report.bytes:,} bytes, "
        f"{report.dtype}{masters} (theta and TPE float32)"
    )
    if not report.compared.endswith("images"):
        click.echo(f"  tokenizer: {report.tokenizer or 'none'}")
    click.echo(
        f"  logits on {report.compared}: largest difference {report.difference:.2e} of the largest logit "
        f"(result by {report.loaded_with})"
    )
    if report.rounding:
        click.echo(f"  from the weights as trained, {report.dtype} moves them by {report.rounding:.2e}")
