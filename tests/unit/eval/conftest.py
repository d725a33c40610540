from pathlib import Path

import pytest

from lightnet_llm.inference import Loaded, load_model
from tests.unit.inference import toy


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory)


@pytest.fixture(scope="session")
def loaded(run: Path) -> Loaded:
    return load_model(run, "cpu")
