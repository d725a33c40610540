"""``lightnet launch``: ready files for Slurm, Kubernetes, torchrun and the deepspeed launcher, from one configuration."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UserError
from ..launch import kubernetes, scripts, slurm
from ..launch.hosts import read_hostfile
from ..launch.job import job_of
from .train import resolve

KINDS = {
    "slurm": (slurm.emit, ".sbatch"),
    "kubernetes": (kubernetes.emit, ".kubernetes.yaml"),
    "torchrun": (scripts.torchrun, ".torchrun.sh"),
    "deepspeed": (scripts.deepspeed, ".deepspeed.sh"),
}


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("--emit", "kinds", type=click.Choice(list(KINDS)), multiple=True, required=True, help="May be repeated.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder to write into; otherwise the file is printed.")
@click.option("--hostfile", help="Hosts and slots of the run, for torchrun and deepspeed.")
def launch(
    config: str, overrides: tuple[str, ...], kinds: tuple[str, ...], output: Path | None, hostfile: str | None
) -> None:
    """Write what starts CONFIG (a YAML file or a preset's name) on a cluster; section `launch` says which."""
    if output is None and len(kinds) > 1:
        raise UserError("several --emit need --output DIR")
    job = job_of(config, overrides, None if hostfile is None else read_hostfile(hostfile), hostfile)
    resolve(job.config, job.world)  # an illegal layout is refused here, not in the queue
    for kind in kinds:
        emit, suffix = KINDS[kind]
        text = emit(job)
        if output is None:
            click.echo(text, nl=False)
            continue
        path = output / f"{job.name}{suffix}"
        try:
            output.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if suffix.endswith("sh") else 0o644)
        except OSError as error:
            raise UserError(f"--output {output}: {path.name} cannot be written ({error.strerror})") from None
        click.echo(path)
