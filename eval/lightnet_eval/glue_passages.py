"""A sentence task out of mini-pile's text, for `make sentences`: ``python -m lightnet_eval.glue_passages TEXT --output DIR``.

``source``: which of the text's sources a passage of 12 to 24 words is from.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import zstandard

from lightnet_llm.errors import UserError

SHORTEST, LONGEST = 12, 24
HELD_OUT = 5  # one passage in so many, the last ones of a source: of other documents, or of the end of one


def passages(text: Path, rng: random.Random) -> dict[str, list[str]]:
    """Passages of every source in the order of its documents; those of one do not overlap."""
    found: dict[str, list[str]] = {}
    with zstandard.open(text, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                source, words = record["meta"]["pile_set_name"], record["text"].split()
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{text}: line {number} is no record of mini-pile; make it again with `make mini-pile`"
                ) from None
            found.setdefault(source, []).extend(_cut(words, rng))
    return found


def _cut(words: list[str], rng: random.Random) -> Iterator[str]:
    while len(words) >= SHORTEST:
        length = min(rng.randint(SHORTEST, LONGEST), len(words))
        yield " ".join(words[:length])
        words = words[length:]


def write(text: Path, output: Path, train: int, dev: int) -> dict[str, int]:
    """Writes ``train`` and ``dev`` of ``source`` below ``output``, every source alike often; returns their numbers of samples.

    Raises:
        UserError: a source has too few passages.
    """
    rng = random.Random(0)
    found = passages(text, rng)
    rows: dict[str, list[tuple[str, str]]] = {"train": [], "dev": []}
    for source, given in sorted(found.items()):
        end = len(given) - len(given) // HELD_OUT
        for split, some, count in (("train", given[:end], train), ("dev", given[end:], dev)):
            each = -(-count // len(found))
            if len(some) < each:
                raise UserError(
                    f"{text}: {source} has {len(some)} passages for {split}, {each} are needed; give --{split} less"
                )
            rows[split] += [(passage, source) for passage in rng.sample(some, each)]
    folder = output / "source"
    folder.mkdir(parents=True, exist_ok=True)
    for split, samples in rows.items():
        rng.shuffle(samples)
        lines = [
            json.dumps({"sentence": passage, "label": label}, ensure_ascii=False) + "\n" for passage, label in samples
        ]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {split: len(samples) for split, samples in rows.items()}


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lightnet_eval.glue_passages", description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a file of mini-pile, data/mini-pile/03.jsonl.zst")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", type=int, default=2000, help="samples to train on")
    parser.add_argument("--dev", type=int, default=1000)
    given = parser.parse_args(arguments)
    try:
        if not given.text.is_file():
            raise UserError(f"{given.text}: no such file; `make mini-pile` writes it")
        counts = write(given.text, given.output, given.train, given.dev)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.output}: " + ", ".join(f"{count:,} {split}" for split, count in counts.items()) + " samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
