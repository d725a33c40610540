"""``lightnet eval``: held-out loss of a checkpoint, and its zero-shot scores."""

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
from .output import replacing, writable


@click.command("eval")
@click.argument("checkpoint", metavar="SOURCE")
@click.option("--data", metavar="DIR|PREFIX", help="Prepared data. [default: held-out split of the run's data.path]")
@click.option(
    "--text", metavar="FILE|FOLDER", help="Raw text instead: .jsonl holds a document a line, else a file is one."
)
@click.option("--field", metavar="FIELD", help="With --text: field of a record that holds the text. [default: text]")
@click.option("--subset-field", metavar="FIELD", help="With --text: field that names a record's subset.")
@click.option(
    "--tasks",
    metavar="A,B",
    help="Zero-shot tasks of lm-eval instead; 'paper' stands for the six of the paper's table.",
)
@click.option(
    "--offline", metavar="DIR", help="Tasks from TASK.SPLIT.jsonl files, no network (`make eval-data`: data/eval)."
)
@click.option(
    "--batch-tokens", type=click.IntRange(min=1), metavar="N", help="Tokens a pass; the result stays the same."
)
@click.option("--max-length", type=click.IntRange(min=1), metavar="N", help="Tokens of a task's request. [no limit]")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N documents, or of each task.")
@click.option("--baselines", is_flag=True, help="Also report gzip -9 and xz -9 on the same text.")
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Processes that share tasks, a GPU each.")
@click.option(
    "--weights", default="trained", show_default=True, metavar="trained|ema", help="ema: the average of train.ema."
)
@click.option("--device", help="cpu, cuda or cuda:N. [default: cuda where there is one]")
@click.option("--dtype", help="fp32 or bf16. [default: as trained; fp32 on the CPU]")
@click.option(
    "--output", metavar="FILE", help="Write the JSON there too; RUN/heldout.json is shown by lightnet report."
)
@click.option("--size", metavar="HxW", help="Of a classifier: pixels other than in training, in whole patches.")
@click.option("--log-samples", is_flag=True, help="With --tasks: every question and answer in the JSON, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and only that, on standard output.")
def eval_(
    checkpoint: str,
    data: str | None,
    text: str | None,
    field: str | None,
    subset_field: str | None,
    tasks: str | None,
    offline: str | None,
    batch_tokens: int | None,
    max_length: int | None,
    limit: int | None,
    baselines: bool,
    processes: int | None,
    weights: str,
    device: str | None,
    dtype: str | None,
    output: str | None,
    size: str | None,
    log_samples: bool,
    as_json: bool,
) -> None:
    """Measure SOURCE (a run folder, one of its steps, or a Hugging Face folder) on held-out documents or tasks.

    Documents: every one starts afresh; each of its tokens and its closing end-of-document token is predicted once from all
    that came before. Reported: nats per token, bits per byte, perplexity per token and per word, of all and by subset.

    Tasks: lm-eval's, zero-shot, with its results as JSON and the paper's table.

    Of an image classifier: top-1 and top-5 on the held-out split or --data FOLDER/SPLIT; with --output FILE.png its
    confusion matrix.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # imports in half the time; nothing is compiled here
    target = writable("--output", output)
    head = _head(checkpoint)
    if head == "denoiser":
        raise UserError(
            f"{checkpoint}: holds a denoiser; measure its images: lightnet sample --reference DIR --features RUN"
        )
    if head in ("masked_lm", "sequence_classifier"):
        raise UserError(
            f"{checkpoint}: holds a {head}; lightnet eval measures language models and image classifiers. Its validation is in "
            "its metrics (lightnet report), and lightnet glue fine-tunes a masked_lm and measures it"
        )
    if head == "classifier":
        from .eval_images import measure_images

        of_text = {
            "--tasks": tasks,
            "--text": text,
            "--field": field,
            "--subset-field": subset_field,
            "--offline": offline,
            "--batch-tokens": batch_tokens,
            "--max-length": max_length,
            "--baselines": baselines,
            "--processes": processes,
            "--log-samples": log_samples,
        }
        for name, value in of_text.items():
            if value:
                raise UserError(f"{name} goes with language models; {checkpoint} is of a classifier: leave it out")
        return measure_images(checkpoint, data, limit, device, dtype, weights, target, as_json, size)
    if size is not None:
        raise UserError(f"--size goes with image classifiers; {checkpoint} is none: leave it out")
    _check_options(data, text, field, subset_field, tasks, offline, max_length, baselines, processes, log_samples)
    if processes is not None and processes > 1 and "RANK" not in os.environ:
        from .processes import in_processes

        sys.exit(in_processes(processes))
    start = time.perf_counter()
    if tasks is not None:
        facts, shown = _zero_shot(
            checkpoint,
            tasks,
            offline,
            limit,
            device,
            dtype,
            weights,
            log_samples,
            batch_tokens=batch_tokens,
            max_length=max_length,
        )
        if facts is None:  # another process tells
            return
    else:
        facts, shown = _held_out(
            checkpoint, data, text, field, subset_field, batch_tokens, limit, baselines, device, dtype, weights
        )
    facts["seconds"] = round(time.perf_counter() - start, 3)
    facts["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    if target is not None:
        with replacing(target) as partial:
            partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    click.echo(
        json.dumps(facts) if as_json else f"{shown}\n  {facts['seconds']} s on {facts['device']} in {facts['dtype']}"
    )


def _head(checkpoint: str) -> str | None:
    """``model.head`` of a run or a checkpoint; None where none is found."""
    import yaml

    try:
        path = Path(checkpoint, "config.yaml")
        return str((yaml.safe_load(path.read_text(encoding="utf-8")) or {})["model"]["head"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def _check_options(
    data: str | None,
    text: str | None,
    field: str | None,
    subset_field: str | None,
    tasks: str | None,
    offline: str | None,
    max_length: int | None,
    baselines: bool,
    processes: int | None,
    log_samples: bool,
) -> None:
    """Options that do not go together, before any work."""
    given = {"--data": data, "--text": text, "--tasks": tasks}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} were both given; choose one")
    if tasks is None:
        of_tasks = {
            "--offline": offline,
            "--max-length": max_length,
            "--processes": processes,
            "--log-samples": log_samples,
        }
        for name, value in of_tasks.items():
            if value:
                raise UserError(f"{name} goes with --tasks; add --tasks paper, say")
    elif baselines:
        raise UserError("--baselines goes with documents; leave out --tasks")
    for name, value in {"--field": field, "--subset-field": subset_field}.items():
        if value is not None and text is None:
            raise UserError(f"{name} goes with --text")


def _zero_shot(
    checkpoint: str,
    tasks: str,
    offline: str | None,
    limit: int | None,
    device: str | None,
    dtype: str | None,
    weights: str,
    log_samples: bool,
    **options: Any,
) -> tuple[dict[str, Any] | None, str]:
    """lm-eval's results with facts of ours, and what is shown of them; None on all ranks but the first."""
    from lightnet_eval.offline import files_of
    from lightnet_eval.published import measured
    from lightnet_eval.ranks import Ranks
    from lightnet_eval.zero_shot import evaluate, summary, task_names

    from ..inference import load_model
    from ..inference.load import require_tokenizer

    names = task_names(tasks)
    if offline is not None:
        files_of(offline)
    ranks = Ranks.join()
    loaded = load_model(checkpoint, device or ranks.device(), dtype, weights)
    require_tokenizer(loaded)
    found = evaluate(loaded, names, offline=offline, limit=limit, ranks=ranks, log_samples=log_samples, **options)
    ranks.barrier()
    if ranks.rank:
        return None, ""
    from ..models import count_parameters

    parameters, tokens = count_parameters(loaded.model), loaded.facts.get("tokens")
    row = measured(found["results"], parameters, tokens)
    facts: dict[str, Any] = {
        "checkpoint": str(loaded.folder),
        "weights": weights,
        **found,
        "paper": {"parameters": parameters, "training_tokens": tokens, "scores": row.scores, "average": row.average},
        "device": str(next(loaded.model.parameters()).device),
        "dtype": str(loaded.model.embedding.weight.dtype).removeprefix("torch."),
        "processes": ranks.size,
    }
    limited = "" if limit is None else f", the first {limit} questions of each task: no score to publish"
    return facts, f"{loaded.folder}, zero-shot{limited}\n{summary(found, parameters, tokens)}"


def _held_out(
    checkpoint: str,
    data: str | None,
    text: str | None,
    field: str | None,
    subset_field: str | None,
    batch_tokens: int | None,
    limit: int | None,
    baselines: bool,
    device: str | None,
    dtype: str | None,
    weights: str,
) -> tuple[dict[str, Any], str]:
    """Figures of documents, and their table."""
    from lightnet_eval.baselines import Baselines
    from lightnet_eval.documents import from_text, prepared
    from lightnet_eval.heldout import score
    from tqdm import tqdm

    from ..inference import load_model
    from ..inference.load import require_tokenizer

    loaded = load_model(checkpoint, device, dtype, weights)
    if text is not None:

        def left_out(line: str) -> None:
            click.echo(f"left out: {line}", err=True)

        source = from_text(text, require_tokenizer(loaded), left_out, subset_field, field or "text")
    else:
        place = data or loaded.config.data.path
        if place is None:
            raise UserError(f"{loaded.folder}: its configuration names no data.path; give --data or --text")
        source = prepared(place, require_tokenizer(loaded) if baselines else loaded.tokenizer)
    compressors = Baselines() if baselines else None
    documents = itertools.islice(source.documents, limit)
    total = source.total_bytes if limit is None else None
    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, delay=1, leave=False, desc="eval") as bar:
        watched = compressors.watch(documents) if compressors else documents
        result = score(loaded.model, watched, source.eod_id, batch_tokens, bar.update)
    facts: dict[str, Any] = {
        "checkpoint": str(loaded.folder),
        "weights": weights,
        "data": source.name,
        **result.as_dict(),
        "baselines": compressors.finish() if compressors else None,
        "device": str(next(loaded.model.parameters()).device),
        "dtype": str(loaded.model.embedding.weight.dtype).removeprefix("torch."),
    }
    if result.unfaithful:
        click.echo(
            f"warning: {result.unfaithful} of {facts['documents']} documents do not decode to their text; words and "
            "baselines are those of the decoded text: use --text",
            err=True,
        )
    return facts, _table(facts)


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
    for name, part in facts.get("subsets", {}).items():
        per_byte = "" if part["bits_per_byte"] is None else f"{part['bits_per_byte']:.4f} bits per byte, "
        lines.append(
            f"  {name}: {per_byte}{part['nats_per_token']:.4f} nats a token, perplexity {part['perplexity']:.3f} "
            f"({part['documents']:,} documents, {part['bytes']:,} bytes)"
        )
    return "\n".join(lines)
