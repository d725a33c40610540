"""``lightnet VERB``: each verb in a module of its own, imported when it is used."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from ..errors import UserError

VERBS = {
    "prep": "Turn text into token shards, with a tokenizer, a manifest and a held-out split.",
    "data": "Verify and inspect prepared data; shards of images and latents.",
    "train": "Train a model from a configuration or preset, in parallel, resumably.",
    "plan": "Say whether a run fits, how long it takes and what it costs, on cards you need not have.",
    "launch": "Write ready files for Slurm, Kubernetes, torchrun or the deepspeed launcher.",
    "convert": "Convert weights to and from Hugging Face folders, and average checkpoints.",
    "eval": "Measure a checkpoint on held-out text: nats, bits per byte, perplexity.",
    "glue": "Fine-tune a masked language model on GLUE or other sentence tasks, and measure it.",
    "generate": "Continue a prompt from a checkpoint.",
    "sample": "Draw images from a diffusion model's checkpoint.",
    "report": "Draw a run's losses, rates and throughput into one HTML page.",
    "doctor": "Check versions, devices, kernels and what each extra lacks.",
}


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    try:
        yield
    except NoArgsIsHelpError:  # no mistake
        raise
    except click.UsageError as error:
        where = f"; {error.ctx.command_path} --help tells what it takes" if error.ctx else ""
        message = " ".join(error.format_message().split())  # choices of an option come a line each
        click.echo(f"error: {message.rstrip('.')}{where}", err=True)
        sys.exit(error.exit_code)


class _Verbs(click.Group):
    """Imports a verb only when it runs, so that ``lightnet --help`` is quick; user errors become one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return getattr(importlib.import_module(f"{__name__}.{cmd_name}"), "eval_" if cmd_name == "eval" else cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _usage_in_one_line():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> object:
        from lightnet_data.errors import DataError

        try:
            with _usage_in_one_line():
                return super().invoke(ctx)
        except (UserError, DataError) as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)


def _to_standard_error(record: logging.LogRecord) -> bool:
    click.echo(record.getMessage(), err=True)
    return False


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lightnet-llm")
def main() -> None:
    """Pretraining of LightNet, linear attention with additive decay."""
    # DeepSpeed logs to standard output, as soon as it is imported; that is for results.
    logging.getLogger("DeepSpeed").addFilter(_to_standard_error)
