"""From YAML files and dotted overrides to a checked :class:`RunConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from ..errors import UserError, nearest
from .run import RunConfig

Schema = TypeVar("Schema", bound=BaseModel)
PRESETS = Path(__file__).resolve().parent.parent / "presets"


def preset_names() -> list[str]:
    """Names under which the shipped configurations can be used, such as ``lm/pile_150m``."""
    return sorted(str(path.relative_to(PRESETS).with_suffix("")) for path in PRESETS.rglob("*.yaml"))


def find_config(name: str, beside: Path | None = None) -> Path:
    """The file behind CONFIG: a path, or a preset's name with or without its folder.

    Raises:
        UserError: no such file or preset, or a bare name that several presets share.
    """
    for base in ([beside] if beside else []) + [Path()]:
        path = base / name
        if path.is_file():
            return path
    wanted = name.removesuffix(".yaml")
    names = preset_names()
    matches = [n for n in names if n == wanted or n.rsplit("/", 1)[-1] == wanted]
    if len(matches) == 1:
        return PRESETS / f"{matches[0]}.yaml"
    if matches:
        raise UserError(f"config '{name}' could be any of {', '.join(matches)}; name its folder too")
    short = ", ".join(n for n in names if "/ablations/" not in n)
    raise UserError(f"config '{name}' is neither a file nor a preset{nearest(wanted, names)}; presets: {short}")


def _read(path: Path, seen: tuple[Path, ...] = ()) -> Any:
    """One YAML file as an OmegaConf tree, merged over the file its ``extends`` names."""
    if path.resolve() in seen:
        raise UserError(f"{path}: 'extends' runs in a circle")
    try:
        tree = OmegaConf.load(path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(tree, DictConfig):
        raise UserError(f"{path}: must hold a mapping of sections such as 'model:' and 'train:'")
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    base = find_config(str(parent), beside=path.parent)
    return OmegaConf.merge(_read(base, (*seen, path.resolve())), tree)


def _one_line(error: ValidationError, source: str, schema: type[BaseModel]) -> str:
    """pydantic's report as one line: field, what is wrong, a near name for a misspelt key."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    more = error.error_count() - 1
    tail = f" (and {more} more)" if more else ""
    if first["type"] == "extra_forbidden":
        section: Any = schema
        for part in first["loc"][:-1]:
            info = getattr(section, "model_fields", {}).get(part)
            section = info.annotation if info else None
        is_section = isinstance(section, type) and issubclass(section, BaseModel)
        known = [info.alias or name for name, info in section.model_fields.items()] if is_section else []
        hint = nearest(str(first["loc"][-1]), known) or (f"; known keys: {', '.join(known)}" if known else "")
        return f"{source}: unknown key '{field}'{hint}{tail}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{source}: '{field}' is missing{tail}"
    if first["type"] == "value_error":
        return f"{source}: {field + ': ' if field else ''}{message}{tail}"
    return f"{source}: '{field}' is {first.get('input')!r}: {message}{tail}"


def validate_as(schema: type[Schema], tree: dict[str, Any], source: str) -> Schema:
    """Check a plain mapping against a schema; ``source`` names it in errors."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise UserError(_one_line(error, source, schema)) from None


def validate(tree: dict[str, Any], source: str) -> RunConfig:
    """Check a plain mapping against a run's schema; ``source`` names it in errors."""
    return validate_as(RunConfig, tree, source)


def load_tree(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """A YAML file with ``key=value`` overrides as a plain mapping, not yet checked.

    Raises:
        UserError: with one line that names the file or the override.
    """
    tree = _read(path)
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key:
            raise UserError(f"override '{item}' is not of the form key=value, such as train.seed=1")
    try:
        if overrides:
            tree = OmegaConf.merge(tree, OmegaConf.from_dotlist(list(overrides)))
        plain = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from None
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}


def load_config(name: str, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read CONFIG (a path or preset name), apply ``key=value`` overrides, check everything.

    Raises:
        UserError: with one line that names the file and field, or the override.
    """
    path = find_config(name)
    plain = load_tree(path, overrides)
    budget = {key.partition("=")[0] for key in overrides}
    train = plain.get("train")
    if isinstance(train, dict):  # overriding one budget replaces the other
        for mine, other in (("steps", "tokens"), ("tokens", "steps")):
            if f"train.{mine}" in budget and f"train.{other}" not in budget:
                train[other] = None
        if train.get("name") is None:
            train["name"] = path.stem
    return validate(plain, str(path) + (" with overrides" if overrides else ""))


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; loading it again gives the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
