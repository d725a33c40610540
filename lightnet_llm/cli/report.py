"""``lightnet report``: one HTML page about one or several runs."""

from __future__ import annotations

import click


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--output", metavar="FILE", help="The page to write. [default: RUN/report.html; needed for several runs]")
def report(runs: tuple[str, ...], output: str | None) -> None:
    """Draw losses, learning rate, throughput and memory of run folders into one HTML file, pictures inside.

    It also shows RUN/heldout.json (lightnet eval RUN --baselines --output RUN/heldout.json) and RUN/sample.txt
    (lightnet generate RUN --prompt TEXT > RUN/sample.txt) where they exist, the configuration and the environment.
    Several runs are drawn into the same charts.
    """
    from ..report import write_report

    click.echo(str(write_report(runs, output)))
