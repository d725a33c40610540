"""``lightnet prep``: raw text to token shards."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import click
from click.core import ParameterSource

BESIDE_CONFIG = ("inputs", "config", "overwrite", "as_json")


@click.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1)
@click.option("--output", metavar="DIR", help="Folder to make: shards, tokenizer and manifest.json.")
@click.option(
    "--config", metavar="FILE", help="YAML file with all of this instead; the arguments are then KEY=VALUE overrides."
)
@click.option("--tokenizer", metavar="PATH", help="SentencePiece model, Hugging Face tokenizer.json, or its folder.")
@click.option("--vocab-size", type=int, metavar="N", help="Train a tokenizer of N ids. [default: suits the corpus]")
@click.option(
    "--model-type", type=click.Choice(["bpe", "unigram"]), default="bpe", show_default=True, help="What to train."
)
@click.option(
    "--field",
    "fields",
    multiple=True,
    default=["text"],
    show_default=True,
    help="Field of a record that holds the text, dots for nested ones; several give an output each.",
)
@click.option(
    "--subset-field", metavar="FIELD", help="Field that names a record's subset (the Pile: meta.pile_set_name)."
)
@click.option("--by-subset", is_flag=True, help="An output for each subset.")
@click.option(
    "--separator", metavar="TEXT", help="What stands between documents of a text file. [default: a file is one]"
)
@click.option(
    "--read-as", type=click.Choice(["text", "jsonl", "parquet", "tar"]), help="Format of files of another suffix."
)
@click.option(
    "--executor",
    type=click.Choice(["local", "slurm", "ray"]),
    default="local",
    show_default=True,
    help="Where parts are worked on: processes here, a Slurm array, or the Ray cluster that is running.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Setting of the executor: time, partition, address, ...",
)
@click.option(
    "--workers", type=int, default=1, show_default=True, metavar="N", help="Processes; same result for any N."
)
@click.option("--skip-bad", is_flag=True, help="Count and report bad input instead of stopping at the first.")
@click.option("--holdout", type=float, default=0.05, show_default=True, help="Share of documents for validation.")
@click.option("--test", type=float, default=0.0, show_default=True, help="Share of documents for a test split.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the held-out choice and the tokenizer sample.")
@click.option("--eod-token", metavar="TOKEN", help="End-of-document token of --tokenizer, where it is not found.")
@click.option("--shard-tokens", type=int, metavar="N", help="Tokens of a shard at most. [default: a split is one]")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["megatron", "webdataset"]),
    default="megatron",
    show_default=True,
    help=".bin/.idx, or tar shards of packed samples, which training also reads by URL.",
)
@click.option("--sequence-length", type=int, metavar="N", help="Tokens of a packed sample, as the run will read them.")
@click.option("--min-chars", type=int, metavar="N", help="Drop documents of fewer characters.")
@click.option("--max-chars", type=int, metavar="N", help="Drop documents of more characters.")
@click.option("--language", metavar="CODE", help="Drop documents of other languages (en, de, ...; needs fastText).")
@click.option(
    "--language-threshold", type=float, default=0.65, show_default=True, help="Certainty that --language asks for."
)
@click.option(
    "--dedup", type=click.Choice(["exact", "minhash"]), help="Keep one of equal texts, or of nearly equal ones."
)
@click.option("--overwrite", is_flag=True, help="Replace a finished data set in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest's summary as JSON, and only that, on stdout.")
@click.pass_context
def prep(
    context: click.Context,
    inputs: tuple[str, ...],
    output: str | None,
    config: str | None,
    tokenizer: str | None,
    vocab_size: int | None,
    model_type: str,
    fields: tuple[str, ...],
    subset_field: str | None,
    by_subset: bool,
    separator: str | None,
    read_as: str | None,
    executor: str,
    settings: tuple[str, ...],
    workers: int,
    skip_bad: bool,
    holdout: float,
    test: float,
    seed: int,
    eod_token: str | None,
    shard_tokens: int | None,
    output_format: str,
    sequence_length: int | None,
    min_chars: int | None,
    max_chars: int | None,
    language: str | None,
    language_threshold: float,
    dedup: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Turn text into token shards that training reads.

    INPUT is a file, a folder, a quoted pattern or a URL. A .jsonl file has one document in the field "text" of each line,
    .parquet and .tar files (WebDataset) one in each record; a file of text or source code is one document; .gz and .zst
    behind them are undone. A file of another suffix needs --read-as. A folder is searched for all of these. Without
    --tokenizer a lossless SentencePiece one is trained. With --config FILE all of this stands in a YAML file, the same for
    all executors.
    """
    if "torch" not in sys.modules:
        # Nothing is compiled here, and importing torch._dynamo is a third of megatron-core's import.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from lightnet_data.errors import DataError
    from lightnet_data.executors import Execution
    from lightnet_data.options import Options
    from lightnet_data.prepare import prepare

    from ..errors import UserError

    try:
        if config is None:
            chosen: dict[str, Any] = {
                "fields": tuple(fields),
                "subset_field": subset_field,
                "by_subset": by_subset,
                "separator": separator,
                "read_as": read_as,
                "skip_bad": skip_bad,
                "vocab_size": vocab_size,
                "model_type": model_type,
                "eod_token": eod_token,
                "holdout": holdout,
                "test": test,
                "seed": seed,
                "shard_tokens": shard_tokens,
                "format": output_format,
                "sequence_length": sequence_length,
                "min_chars": min_chars,
                "max_chars": max_chars,
                "language": language,
                "language_threshold": language_threshold,
                "dedup": dedup,
            }
            execution = Execution(executor, workers, _settings(settings, executor))
        else:
            _alone(context)
            inputs, output, tokenizer, overwrite, chosen, given = _configured(config, inputs, overwrite)
            execution = Execution(**given)
        if output is None:
            raise click.UsageError("Missing option '--output'.")
        manifest = prepare(
            inputs,
            output,
            tokenizer,
            Options(**chosen),
            overwrite=overwrite,
            reporter=_terminal(quiet=as_json),
            execution=execution,
        )
    except (DataError, UserError) as error:
        _fail(str(error))
    except OSError as error:  # a full disk, an output folder that may not be written
        where = f"{error.filename}: " if error.filename else f"{output}: "
        _fail(f"{where}{error.strerror or error}; {output} was not made; run it again to go on with what is done")
    if manifest.get("submitted"):
        click.echo(
            f"{manifest['stage']}: {manifest['tasks']} tasks are in the queue as job {manifest['job']}; run the same command "
            "again when they are done"
        )
        return
    summary = _summary(manifest, output)
    if as_json:
        click.echo(json.dumps(summary, ensure_ascii=False))
    else:
        _print(summary)


def _alone(context: click.Context) -> None:
    """With --config, everything else is said in the file or by overrides."""
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in BESIDE_CONFIG and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} does not go with --config; give KEY=VALUE, such as output=DIR")


def _configured(
    name: str, overrides: tuple[str, ...], overwrite: bool
) -> tuple[tuple[str, ...], str, str | None, bool, dict[str, Any], dict[str, Any]]:
    """Inputs, output, tokenizer, whether to overwrite, options and execution of a configuration file."""
    from ..config.prep import load_prep

    config = load_prep(name, overrides)
    options = config.records.model_dump() | config.select.model_dump() | config.write.model_dump()
    options |= config.tokenizer.model_dump(exclude={"path"})
    options["fields"] = tuple(options["fields"])
    execution = config.executor.model_dump()
    return tuple(config.inputs), config.output, config.tokenizer.path, overwrite or config.overwrite, options, execution


def _settings(given: tuple[str, ...], executor: str) -> dict[str, Any]:
    """KEY=VALUE pairs; numbers as such. A configuration file may hold those of a cluster and run here all the same."""
    from lightnet_data.errors import DataError

    if given and executor == "local":
        raise DataError(f"--set {given[0]}: goes with --executor slurm or ray; the local one has --workers alone")
    pairs = [pair.partition("=") for pair in given]
    for name, equals, _ in pairs:
        if not equals:
            raise DataError(f"--set {name}: write KEY=VALUE")
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def _fail(message: str) -> NoReturn:
    raise _Failure(message)


class _Failure(click.ClickException):
    """One line on stderr and exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", file=file or sys.stderr)


def _terminal(quiet: bool) -> Any:
    """Notes and progress on stderr; progress only on a terminal, or once a stage has lasted a while."""
    from lightnet_data.prepare import Reporter

    from .progress import bar

    class Terminal(Reporter):
        def note(self, line: str) -> None:
            click.echo(f"note: {line}", err=True)

        @contextlib.contextmanager
        def progress(self, stage: str, total: int) -> Iterator[Callable[[int], Any]]:
            with bar(stage, total, quiet) as update:
                yield update

    return Terminal()


def _summary(manifest: dict[str, Any], output: str) -> dict[str, Any]:
    """The manifest with its list of files summed up."""
    files = manifest["sources"]
    sources = {"files": len(files), "bytes": sum(file["bytes"] for file in files)}
    return {"output": str(Path(output)), **manifest, "sources": sources}


def _print(summary: dict[str, Any]) -> None:
    tokenizer, tokens, size = summary["tokenizer"], summary["tokens"], summary["bytes"]
    click.echo(
        f"{summary['output']}: {summary['documents']:,} documents, {size:,} bytes, {tokens:,} tokens "
        f"({size / tokens:.2f} bytes a token) from {summary['sources']['files']:,} files"
    )
    for name, split in summary["splits"].items():
        out = ", left out" if "left_out" in split else ""
        click.echo(
            f"  {name}: {split['documents']:,} documents, {split['bytes']:,} bytes, {split['tokens']:,} tokens{out}"
        )
    click.echo(
        f"  {tokenizer['file']}: {tokenizer['kind']}, {tokenizer['vocab_size']:,} ids, end of document "
        f"{tokenizer['eod_token']} = {tokenizer['eod_id']}, sha256 {tokenizer['fingerprint'][:16]}"
    )
    for what in ("skipped", "dropped"):
        for kind, entry in summary.get(what, {}).items():
            click.echo(f"  {what}, {kind}: {entry['count']:,} (first: {entry['first']})")
    if summary["ignored_files"]:
        common = sorted(summary["ignored_files"].items(), key=lambda item: -item[1])
        ignored = ", ".join(f"{count:,} {reason}" for reason, count in common[:8])
        others = sum(count for _, count in common[8:])
        click.echo(f"  not read: {ignored}" + (f", {others:,} of {len(common) - 8} other kinds" if others else ""))
    marks, trip = summary["space_symbols"], summary["round_trip"]
    if marks["count"] and tokenizer["kind"] == "sentencepiece":
        click.echo(f"  U+2581, which decodes to a space: {marks['count']:,} in {marks['documents']:,} documents")
    if trip["checked"]:
        click.echo(
            f"  decoded again: {trip['checked']:,} documents, {trip['checked'] - trip['differ']:,} to the same text"
        )
    if trip["differ"]:
        click.echo(
            f"  the tokenizer is not lossless: {trip['differ']:,} of {trip['checked']:,} documents looked at do not "
            f"decode to their text (first: {trip['first']})"
        )
