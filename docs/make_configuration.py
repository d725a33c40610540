"""Writes docs/configuration.md from the schema: ``python docs/make_configuration.py``. A test keeps it up to date."""

from pathlib import Path

from lightnet_llm.config import RunConfig, preset_names


def page() -> str:
    """The page as Markdown."""
    lines = ["# Configuration", "", "Made by `python docs/make_configuration.py` from the schema; do not edit.", ""]
    lines += ["A file may start from another with `extends: preset-or-path`; overrides are `section.field=value`.", ""]
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if not hasattr(section, "model_fields"):
            lines += [f"## {name}", "", str(field.description), ""]
            continue
        lines += [
            f"## {name}",
            "",
            (section.__doc__ or "").splitlines()[0],
            "",
            "| field | default | |",
            "|---|---|---|",
        ]
        for key, inner in section.model_fields.items():
            default = "required" if inner.is_required() else repr(inner.get_default(call_default_factory=True))
            lines.append(
                f"| `{inner.alias or key}` | `{default}` | {inner.description} |".replace("`'", "`").replace("'`", "`")
            )
        lines.append("")
    lines += ["## Presets", "", ", ".join(f"`{name}`" for name in preset_names()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    Path(__file__).with_name("configuration.md").write_text(page())
