"""What general compressors make of the same text: ``gzip -9`` and ``xz -9`` in bits per byte."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from .documents import HeldOutDocument


class Baselines:
    """Compresses texts as they pass by, all as one stream: ``cat texts | gzip -9 | wc -c`` and the same for xz.

    Nothing marks where a text ends, so the compressors are spared what a model pays for its end-of-document tokens.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {
            "gzip -9": zlib.compressobj(9, zlib.DEFLATED, 31),  # 31: the gzip container, as the program writes it
            "xz -9": lzma.LZMACompressor(lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=9),
        }
        self._sizes = dict.fromkeys(self._streams, 0)
        self.bytes = 0

    def watch(self, documents: Iterable[HeldOutDocument]) -> Iterator[HeldOutDocument]:
        """The same documents, each compressed on its way. They must have texts."""
        for document in documents:
            assert document.text is not None
            self.add(document.text)
            yield document

    def add(self, text: str) -> None:
        """Compress one more text."""
        data = text.encode("utf-8", "replace")
        self.bytes += len(data)
        for name, stream in self._streams.items():
            self._sizes[name] += len(stream.compress(data))

    def finish(self) -> dict[str, dict[str, float]]:
        """``{name: {"bytes": compressed size, "bits_per_byte": ...}}``; call it once, at the end."""
        for name, stream in self._streams.items():
            self._sizes[name] += len(stream.flush())
        return {
            name: {"bytes": size, "bits_per_byte": 8 * size / max(self.bytes, 1)} for name, size in self._sizes.items()
        }
