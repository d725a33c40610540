"""Small corpora, a small tokenizer and hand-made shards for the data tests."""

import json
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from lightnet_data.storage import indexed_dataset
from lightnet_data.tokenizer import Tokenizer

from lightnet_llm.cli.prep import prep

EOD = 1


@pytest.fixture(scope="session")
def python_texts() -> list[str]:
    """Some modules of the standard library."""
    names = ["argparse", "ast", "calendar", "csv", "dataclasses", "enum", "inspect", "json/decoder", "logging/__init__"]
    return [Path(sysconfig.get_paths()["stdlib"], f"{name}.py").read_text(encoding="utf-8") for name in names]


@pytest.fixture(scope="session")
def tokenizer(python_texts: list[str]) -> Tokenizer:
    return Tokenizer.train([*python_texts, "naïve café 東京 😀\ttab\r\n"], 700)


@pytest.fixture(scope="session")
def tokenizer_file(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer.save(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def run_prep() -> Callable[..., Result]:
    """``lightnet prep`` in this process."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(prep, [str(argument) for argument in arguments], catch_exceptions=False)

    return run


@pytest.fixture
def corpus(tmp_path: Path, python_texts: list[str]) -> Path:
    """A .jsonl of 60 documents."""
    path = tmp_path / "corpus.jsonl"
    texts = [text[start : start + 900] for text in python_texts for start in range(0, 18000, 2000)][:60]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_shards(prefix: Path, documents: Sequence[Sequence[int]]) -> Path:
    """Shards of documents given without their end-of-document token, which is ``EOD``."""
    builder = indexed_dataset().IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array([*document, EOD]), [len(document) + 1])
    builder.finalize(f"{prefix}.idx")
    return prefix
