"""Folders of encoded sentences and pairs with a label each: a file a split, the tokenizer, a manifest.

A sample begins as a document does in training, with the end-of-document token; between the sentences of a pair stands another.
"""

import hashlib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightnet_data import manifest
from lightnet_data.errors import DataError
from lightnet_data.shuffle import Permutation
from lightnet_data.tokenizer import FILE_NAMES, Tokenizer

SECTION = "sentences"  # of the manifest
_ROUND = 8  # rows are padded to a multiple, so that shapes repeat
_KEPT_EPOCHS = 2


class Row(NamedTuple):
    """One sample.

    Attributes:
        first, second: its sentences; ``second`` is None where there is one.
        label: number of its class, or a regression's value.
    """

    first: str
    second: str | None
    label: float


def encode(tokenizer: Tokenizer, first: str, second: str | None, length: int) -> tuple[list[int], bool]:
    """Token ids of a sentence or pair, at most ``length``, and whether any were cut off.

    What does not fit is cut off the end of the longer sentence, token by token, as BERT's recipe does.
    """
    parts = [tokenizer.encode(text) for text in (first, second) if text is not None]
    room = max(length - len(parts), 0)
    spare = sum(map(len, parts)) - room
    if spare > 0 and len(parts) == 2:
        short = min(map(len, parts))
        keep = max(room - short, room - room // 2)  # the shorter one stays whole where it has no more than half
        longer = int(len(parts[1]) > len(parts[0]))
        parts[longer] = parts[longer][:keep]
        parts[1 - longer] = parts[1 - longer][: room - len(parts[longer])]
    elif spare > 0:
        parts = [parts[0][:room]]
    return [token for part in parts for token in (tokenizer.eod_id, *part)], spare > 0


def write(
    folder: str | Path,
    splits: Mapping[str, Iterable[Row]],
    tokenizer: Tokenizer,
    length: int,
    classes: Sequence[str] | None,
) -> dict[str, Any]:
    """Encode splits into a folder; the manifest comes last, so that a folder with one is whole.

    Args:
        length: tokens of a sample, at most; longer ones are cut, and counted.
        classes: names by number; None: labels are values of a regression.

    Returns:
        the manifest's section: ``length``, ``classes``, and of each split its ``samples``, ``tokens``, how many were ``cut``, and
        ``sha256``.

    Raises:
        DataError: a split without samples, or a label that is no class or not finite; it names the sample.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"length": length, "classes": None if classes is None else list(classes), "splits": {}}
    for split, rows in splits.items():
        tokens: list[NDArray[np.int32]] = []
        labels, cut = [], 0
        for number, row in enumerate(rows):
            wrong = not np.isfinite(row.label) if classes is None else row.label not in range(len(classes))
            if wrong:
                wanted = "a finite number" if classes is None else f"a class, 0 to {len(classes) - 1}"
                raise DataError(f"{folder}/{split}: the label of sample {number} is {row.label}, not {wanted}")
            ids, shortened = encode(tokenizer, row.first, row.second, length)
            tokens.append(np.array(ids, dtype=np.int32))
            labels.append(row.label)
            cut += shortened
        if not tokens:
            raise DataError(f"{folder}/{split}: holds no samples")
        bounds = np.concatenate([[0], np.cumsum([len(ids) for ids in tokens])])
        path = folder / f"{split}.npz"
        with (folder / f".{split}.npz").open("wb") as file:
            np.savez(file, tokens=np.concatenate(tokens), bounds=bounds, labels=np.array(labels, dtype=np.float64))
        (folder / f".{split}.npz").replace(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        facts["splits"][split] = {"samples": len(labels), "tokens": int(bounds[-1]), "cut": cut, "sha256": digest}
    tokenizer.save(folder)
    named = {"file": FILE_NAMES[tokenizer.kind], "kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
    named |= {"eod_id": tokenizer.eod_id, "eod_token": tokenizer.eod_token, "fingerprint": tokenizer.fingerprint}
    form = {"format": manifest.FORMAT, "format_version": manifest.FORMAT_VERSION}
    manifest.save(folder, {**form, "tokenizer": named, SECTION: facts})
    return facts


def load(folder: str | Path) -> dict[str, Any]:
    """The section of a folder's manifest, as :func:`write` returns it, and ``tokenizer``.

    Raises:
        DataError: it is no such folder.
    """
    written = manifest.load(folder)
    if SECTION not in written:
        raise DataError(f"{folder}: holds no sentences with labels; write them with lightnet_data.sentences.write")
    return {**written[SECTION], "tokenizer": written["tokenizer"]}


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """The samples of a split by global position, every one once an epoch; map-style.

    Args:
        location: FOLDER/SPLIT.
        length: tokens of a sample, at most.
        seed, shuffle: as of :class:`~lightnet_data.dataset.PackedTokens`.

    Raises:
        DataError: files are missing or damaged, or a sample is longer.
    """

    def __init__(self, location: str | Path, length: int, seed: int = 0, shuffle: bool = True) -> None:
        folder, _, split = str(location).rpartition("/")
        self.facts = load(folder)
        if split not in self.facts["splits"]:
            raise DataError(f"{location}: no such split; {folder} has {', '.join(self.facts['splits'])}")
        try:
            with np.load(f"{location}.npz") as arrays:
                self.tokens, self.bounds, self.labels = (arrays[name] for name in ("tokens", "bounds", "labels"))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{location}.npz: not readable ({error}); write the folder again") from None
        self.samples_per_epoch = len(self.labels)
        if self.samples_per_epoch != self.facts["splits"][split]["samples"]:
            raise DataError(f"{location}.npz: belongs to another manifest; write the folder again")
        lengths = np.diff(self.bounds)
        if lengths.max() > length:
            at = int(lengths.argmax())
            raise DataError(
                f"{location}: sample {at} has {lengths[at]} tokens, more than sequence_length {length}; write the folder "
                "again with as many, or set data.sequence_length"
            )
        self.regression, self.seed, self.shuffle = self.facts["classes"] is None, seed, shuffle
        count = len(self.facts["classes"] or ())
        wrong = ~np.isfinite(self.labels) if self.regression else ~np.isin(self.labels, np.arange(count))
        if wrong.any():
            at = int(wrong.argmax())
            wanted = "a finite number" if self.regression else f"a class, 0 to {count - 1}"
            raise DataError(f"{location}: the label of sample {at} is {self.labels[at]}, not {wanted}; write it again")
        self._epochs: dict[int, Permutation] = {}

    def __len__(self) -> int:
        """Samples of one epoch. Positions beyond it are valid: they belong to later epochs."""
        return self.samples_per_epoch

    def __getitem__(self, position: int) -> dict[str, Any]:
        """input_ids int64 [n], label (int, of a regression float), sample_id (the position)."""
        epoch, place = divmod(position, self.samples_per_epoch)
        if self.shuffle:
            if epoch not in self._epochs:
                while len(self._epochs) >= _KEPT_EPOCHS:
                    del self._epochs[next(iter(self._epochs))]
                self._epochs[epoch] = Permutation(self.samples_per_epoch, self.seed, epoch)
            place = self._epochs[epoch](place)
        ids = self.tokens[self.bounds[place] : self.bounds[place + 1]].astype(np.int64)
        label = float(self.labels[place])
        return {"input_ids": ids, "label": label if self.regression else int(label), "sample_id": position}


def collate(samples: Sequence[dict[str, Any]], padding: int = 0) -> dict[str, torch.Tensor]:
    """One micro-batch, padded at the end to the longest.

    Args:
        samples: B of them.
        padding: id that fills rows up; it is never looked at.

    Returns:
        input_ids: int64 [B, N]. mask: bool [B, N], true for real tokens. labels: int64 [B] or float32 [B]. sample_ids: int64
        [B]. cu_seqlens: int32, bounds over the B * N flattened tokens of segments: each row's tokens, then its padding.
    """
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    width = -(-int(lengths.max()) // _ROUND) * _ROUND
    mask = np.arange(width) < lengths[:, None]
    ids = np.full(mask.shape, padding, dtype=np.int64)
    ids[mask] = np.concatenate([sample["input_ids"] for sample in samples])
    starts = np.arange(len(samples)) * width
    bounds = np.unique(np.concatenate([starts, starts + lengths, [len(samples) * width]]))
    labels = [sample["label"] for sample in samples]
    kind = torch.int64 if all(isinstance(label, int) for label in labels) else torch.float32
    return {
        "input_ids": torch.from_numpy(ids),
        "mask": torch.from_numpy(mask),
        "labels": torch.tensor(labels, dtype=kind),
        "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
        "sample_ids": torch.tensor([sample["sample_id"] for sample in samples], dtype=torch.int64),
    }
