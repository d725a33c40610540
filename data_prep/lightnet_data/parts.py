"""How a corpus is cut into parts: the unit of work, of what is not redone, and of the canonical order.

Parts depend on the sources alone, never on workers: a run of small files, one file, or a range of bytes of a large
uncompressed one of JSON lines or of documents behind a separator.
"""

import hashlib
import itertools
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightnet_data.errors import DataError
from lightnet_data.options import OF_THE_MERGE
from lightnet_data.output import replace
from lightnet_data.reading import Span, is_unambiguous
from lightnet_data.sources import Source, Sources

PART_BYTES = 1 << 26
FILE_NAME = "plan.pickle"
UNSTAMPED = (0, "")  # of a file that could not be looked at, or whose server tells neither size nor tag


@dataclass
class Plan:
    """The parts, and what each file was when they were cut.

    ``spans`` spans of each part, in canonical order; ``stamps`` of each file by name; ``request`` all that the tokens
    depend on besides the sources.
    """

    request: dict[str, Any]
    sources: Sources
    inputs: list[str]
    stamps: dict[str, tuple[int, str]] = field(default_factory=dict)
    spans: list[list[Span]] = field(default_factory=list)

    def part_bytes(self, part: int) -> int:
        """Stored bytes of a part."""
        return sum((span.end or self.stamps[span.source.name][0]) - span.start for span in self.spans[part])

    def fingerprint(self, part: int | None = None) -> str:
        """Of a part, or of the whole: changes with the request, the spans and their files."""
        parts = self.spans if part is None else [self.spans[part]]
        facts = [
            [s.source.name, s.source.format, s.start, s.end, *self.stamps[s.source.name]] for p in parts for s in p
        ]
        request = {name: value for name, value in self.request.items() if name not in OF_THE_MERGE}
        return hashlib.sha256(json.dumps([request, facts]).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write it for the tasks, of which a queued one may begin to read it just now."""
        replace(folder / FILE_NAME, pickle.dumps(self))

    def check(self, source: Source) -> None:
        """Raise a DataError if a file is not what it was."""
        try:
            now = source.stamp()
        except OSError:
            now = UNSTAMPED
        if now != self.stamps[source.name]:
            raise DataError(f"{source.name}: the file changed while it was being read; run lightnet prep again")


def cut(sources: Sources, inputs: Sequence[str], request: dict[str, Any]) -> Plan:
    """The plan of a corpus."""
    plan = Plan(request, sources, list(inputs))
    group: list[Span] = []
    size = 0
    for source in sources.files:
        try:
            stamp = source.stamp()
        except OSError:  # met again, and reported, when it is read
            stamp = UNSTAMPED
        plan.stamps[source.name] = stamp
        if size + stamp[0] > PART_BYTES and group:
            plan.spans.append(group)
            group, size = [], 0
        if stamp[0] > PART_BYTES and _divides(source, request.get("separator")):
            bounds = [*range(0, stamp[0], PART_BYTES), stamp[0]]
            plan.spans += [[Span(source, start, end)] for start, end in itertools.pairwise(bounds)]
            continue
        group.append(Span(source))
        size += stamp[0]
    if group:
        plan.spans.append(group)
    return plan


def _divides(source: Source, separator: str | None) -> bool:
    """Whether a range of a file's bytes can be read alone."""
    if source.compression is not None or source.url is not None:
        return False
    return source.format == "jsonl" or (source.format == "text" and separator is not None and is_unambiguous(separator))


@lru_cache(maxsize=4)
def load(folder: Path) -> Plan:
    """The plan that ``save`` wrote; each process reads it once."""
    plan: Plan = pickle.loads((folder / FILE_NAME).read_bytes())
    return plan
