"""Where a run is meant to run: what `lightnet launch` needs to write ready files."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator

from .base import Section

Text = Annotated[str, Field(coerce_numbers_to_str=True)]

_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._@-]*"
)  # what may stand in a line of #SBATCH or a name of Kubernetes as it is
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"[^\s:,'\"]+")  # both runtimes separate mounts by : and ,


class LaunchConfig(Section):
    """Cluster and resources, read by `lightnet launch` alone."""

    nodes: int = Field(default=1, gt=0, description="Hosts.")
    gpus_per_node: int = Field(default=8, gt=0, description="GPUs, and so ranks, of each host.")
    cpus_per_node: int | None = Field(
        default=None, gt=0, description="Processor cores of each host; null: not asked for (Slurm: whole nodes)."
    )
    memory_gib: int | None = Field(default=None, gt=0, description="Memory of each host in GiB; null: not asked for.")
    time: str | None = Field(default="1-00:00:00", description="Slurm: time limit, as [days-]hours:minutes:seconds.")
    partition: str | None = Field(default=None, description="Slurm: partition.")
    account: str | None = Field(default=None, description="Slurm: account.")
    qos: str | None = Field(default=None, description="Slurm: quality of service.")
    grace_seconds: int = Field(
        default=300,
        ge=0,
        description="Time to finish a step and save before the limit (Slurm) or a removal (Kubernetes).",
    )
    namespace: str | None = Field(default=None, description="Kubernetes: namespace.")
    secret: str | None = Field(
        default=None, description="Kubernetes: secret whose entries become environment variables."
    )
    shared_memory_gib: int = Field(default=16, gt=0, description="Kubernetes: size of /dev/shm in GiB.")
    image: str | None = Field(
        default=None,
        description="Container image. Kubernetes: null means lightnet:latest; Slurm: null means none (else pyxis).",
    )
    volumes: dict[str, str] = Field(
        default_factory=dict,
        description="Folder of the host (or, without a slash, claim of Kubernetes) to path in the container; "
        "the run starts in the first path.",
    )
    environment: dict[str, Text] = Field(default_factory=dict, description="Variables to set; any characters.")
    setup: list[str] | None = Field(
        default=None, description="Shell lines to run first; null: `. .venv/bin/activate` where there is no image."
    )

    @field_validator("partition", "account", "qos", "namespace", "secret")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError(f"'{value}' is not a name of letters, digits and ._@-")
        return value

    @field_validator("time")
    @classmethod
    def _time(cls, value: str | None) -> str | None:
        if value is not None and not _TIME.fullmatch(value):
            raise ValueError(f"'{value}' is not a time of Slurm, such as 12:00:00 or 2-00:00:00")
        return value

    @field_validator("image")
    @classmethod
    def _image(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^\s'\"]+", value):
            raise ValueError(f"'{value}' is not an image's name")
        return value

    @field_validator("volumes")
    @classmethod
    def _volumes(cls, value: dict[str, str]) -> dict[str, str]:
        for source, path in value.items():
            if not _PATH.fullmatch(source) or not _PATH.fullmatch(path) or not path.startswith("/"):
                raise ValueError(
                    f"'{source}: {path}' is not a folder or claim to absolute path, free of spaces, : and ,"
                )
        if len(set(value.values())) < len(value):
            raise ValueError("two volumes have the same path in the container")
        return value

    @field_validator("environment")
    @classmethod
    def _environment(cls, value: dict[str, str]) -> dict[str, str]:
        for name, content in value.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"'{name}' is not a variable's name")
            if "\0" in content:
                raise ValueError(f"the value of {name} holds a NUL byte")
        return value
