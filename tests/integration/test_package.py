"""An installed package works without the repository: presets ship with it, and importable folders do not clash."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.conftest import ROOT

PARTS = ("lightnet_llm", "kernels", "data_prep", "eval", "configs", "pyproject.toml", "README.md", "LICENSE")


def test_wheel_holds_the_packages_and_presets(tmp_path: Path) -> None:
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    source.mkdir()
    for part in PARTS:
        path = ROOT / part
        if path.is_dir():
            shutil.copytree(path, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(path, source / part)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    zipfile.ZipFile(next(wheels.glob("*.whl"))).extractall(site)
    code = (
        "import lightnet_llm, lightnet_kernels, lightnet_data, lightnet_eval;"
        "from lightnet_llm.config import load_config, preset_names;"
        "assert all(m.__file__.startswith(sys.argv[1]) for m in"
        " (lightnet_llm, lightnet_kernels, lightnet_data, lightnet_eval));"
        "assert len(preset_names()) >= 21;"
        "assert load_config('wikitext103_no_share').model.decay == 'independent'"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", "import sys;" + code, str(site)], check=True, env=environment, cwd=tmp_path)


def test_no_top_level_folder_is_importable() -> None:
    """A bare importable folder called kernels breaks transformers, which looks for a library of that name."""
    for folder in ("kernels", "data_prep", "launch", "configs", "eval", "benchmarks", "docs"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_cli_help_is_quick_and_lists_every_verb() -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from lightnet_llm.cli import main; main(['--help'], standalone_mode=False);"
            "assert 'torch' not in sys.modules",
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    for verb in ("prep", "train", "eval", "generate", "report", "doctor"):
        assert verb in result.stdout
