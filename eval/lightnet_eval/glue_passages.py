"""Two sentence tasks out of mini-pile's text, for `make sentences`: ``python -m lightnet_eval.glue_passages TEXT --output DIR``.

``source``: which of the text's sources a passage of 12 to 24 words is from. ``order``: whether the passage stands as it was
written, or four neighbouring words of it are in another order; there, unlike in ``source``, words alone tell nothing.
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

SHORTEST, LONGEST, MOVED = 12, 24, 4
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


def disordered(passage: str, rng: random.Random) -> str | None:
    """Four neighbouring words of it in another order; None where they are all the same word."""
    words = passage.split()
    start = rng.randrange(len(words) - MOVED + 1)
    part = words[start : start + MOVED]
    if len(set(part)) == 1:
        return None
    moved = list(part)
    while moved == part:
        rng.shuffle(moved)
    return " ".join([*words[:start], *moved, *words[start + MOVED :]])


def write(text: Path, output: Path, train: int, dev: int) -> dict[str, int]:
    """Writes ``source`` and ``order`` below ``output``; returns their numbers of training samples.

    Raises:
        UserError: a source has too few passages.
    """
    rng = random.Random(0)
    found = passages(text, rng)
    counts: dict[str, int] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for source, given in sorted(found.items()):
        end = len(given) - len(given) // HELD_OUT
        wanted = {"train": -(-train // len(found)), "dev": -(-dev // len(found))}
        parts[source] = {}
        for split, some in (("train", given[:end]), ("dev", given[end:])):
            if len(some) < wanted[split]:
                raise UserError(
                    f"{text}: {source} has {len(some)} passages for {split}, {wanted[split]} are needed; give --{split} less"
                )
            parts[source][split] = rng.sample(some, wanted[split])
    for task in ("source", "order"):
        (output / task).mkdir(parents=True, exist_ok=True)
        for split in ("train", "dev"):
            rows = [(passage, source) for source in parts for passage in parts[source][split]]
            rng.shuffle(rows)
            if task == "order":
                rows = _in_and_out_of_order([passage for passage, _ in rows], rng)
            lines = [
                json.dumps({"sentence": passage, "label": label}, ensure_ascii=False) + "\n" for passage, label in rows
            ]
            (output / task / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
            counts[task] = counts.get(task, len(rows))
    return counts


def _in_and_out_of_order(given: list[str], rng: random.Random) -> list[tuple[str, str]]:
    rows = []
    for index, passage in enumerate(given):
        moved = disordered(passage, rng) if index % 2 else None
        rows.append((passage, "written") if moved is None else (moved, "moved"))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lightnet_eval.glue_passages", description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a file of mini-pile, data/mini-pile/03.jsonl.zst")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", type=int, default=2000, help="samples of a task")
    parser.add_argument("--dev", type=int, default=1000)
    given = parser.parse_args(arguments)
    try:
        if not given.text.is_file():
            raise UserError(f"{given.text}: no such file; `make mini-pile` writes it")
        counts = write(given.text, given.output, given.train, given.dev)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.output}: " + ", ".join(f"{task} {count:,} samples" for task, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
