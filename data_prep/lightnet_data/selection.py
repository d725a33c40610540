"""Which documents are kept: filters of length and language, and de-duplication, by datatrove's own blocks."""

import re
import resource
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters.lambda_filter import LambdaFilter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

from lightnet_data import parts, pipeline
from lightnet_data.errors import DataError
from lightnet_data.options import DEDUPS, Options

LONGEST_PRIORITY = 2**16 - 1
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CJK}]|[^\\W{_CJK}]+")


@dataclass
class Stage:
    """A pipeline that must have run before the documents are known; ``tasks`` None: one a part."""

    name: str
    steps: list[PipelineStep]
    tasks: int | None = None


class Dropped:
    """What datatrove's blocks call a writer of excluded documents: this one counts them in the part's report."""

    def __init__(self, report: pipeline.Report, kind: str) -> None:
        self._report, self._kind = report, kind

    def __enter__(self) -> "Dropped":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def write(self, document: Document, rank: int = 0) -> None:
        """Count one."""
        self._report.drop(self._kind, str(document.id))


class Words(WordTokenizer):
    """Words of letters and digits, a CJK character each: needs no package and no model, unlike datatrove's own."""

    def word_tokenize(self, text: str) -> list[str]:
        """Words of a text."""
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """The text: MinHash looks at words only."""
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Bounds of ``sent_tokenize``."""
        return [(0, len(text))]


def check(options: Options) -> None:
    """Raise a DataError for options that cannot be, or whose packages or model are not there."""
    low, high = options.min_chars, options.max_chars
    for name, value in (("--min-chars", low), ("--max-chars", high), ("--shard-tokens", options.shard_tokens)):
        if value is not None and value < 1:
            raise DataError(f"{name} {value}: must be at least 1")
    if low is not None and high is not None and low > high:
        raise DataError(f"--min-chars {low} is above --max-chars {high}: no document would be left")
    if options.dedup not in (None, *DEDUPS):
        raise DataError(f"--dedup {options.dedup}: one of {', '.join(DEDUPS)}")
    if options.dedup and len(options.fields) > 1:
        raise DataError(
            "--dedup goes with one --field: dropping a document of one field would leave those of the others"
        )
    if options.language is not None:
        _language_filter(options, None).model.model.predict("a text")


def _language_filter(options: Options, dropped: Dropped | None) -> Any:
    from datatrove.pipeline.filters.language_filter import LanguageFilter

    try:
        made = LanguageFilter([str(options.language)], options.language_threshold, exclusion_writer=dropped)
    except ImportError:
        raise DataError(
            "--language needs fastText: pip install fasttext-numpy2-wheel fasteners, or leave --language out"
        ) from None
    try:
        made.model.model  # noqa: B018 - loads it
    except Exception as error:  # of requests, urllib, fsspec or fastText
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"--language needs the model {made.model.MODEL_URL}, which cannot be had ({type(error).__name__}: {reason}); "
            "run once where the network reaches it, and copy ~/.cache/huggingface/assets/datatrove here"
        ) from None
    made.model._model = None  # is loaded again where it is used, and must not be pickled
    return made


def filters(options: Options, report: pipeline.Report) -> list[PipelineStep]:
    """Blocks that look at one document at a time."""
    steps: list[PipelineStep] = []
    if options.min_chars is not None or options.max_chars is not None:
        keep = partial(_fits, low=options.min_chars or 0, high=options.max_chars or 2**63)
        steps.append(LambdaFilter(keep, exclusion_writer=Dropped(report, "length")))
    if options.language is not None:
        steps.append(_language_filter(options, Dropped(report, f"not {options.language}")))
    return steps


def _fits(document: Document, low: int, high: int) -> bool:
    return low <= len(document.text) <= high


def _text(document: Document) -> bytes:
    return document.text.encode()


def _priority(document: Document) -> int:
    """Of equal texts the first is kept: part by part, and inside a part by place."""
    return max(1, LONGEST_PRIORITY - int(document.metadata["part"]))


def stages(folder: Path, options: Options) -> list[Stage]:
    """What finds duplicates, before ``filters`` and ``duplicates`` let documents through."""
    work = folder / "dedup"
    report = pipeline.Report()
    first: list[PipelineStep] = [pipeline.Reader(folder, options, report), *filters(options, report)]
    if options.dedup == "exact":
        exact = ExactDedupConfig(content_getter=_text, document_priority=_priority)
        find = ExactFindDedups(str(work / "signatures"), str(work / "found"), exact)
        return [
            Stage("hashing", [*first, ExactDedupSignature(str(work / "signatures"), exact)]),
            Stage("comparing", [find], 1),
        ]
    if options.dedup == "minhash":
        near = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))  # datatrove gives xxhash strings, which it refuses
        signature = MinhashDedupSignature(str(work / "signatures"), near, Words())
        pairs = MinhashDedupBuckets(
            str(work / "signatures"), str(work / "pairs"), config=near, only_dedup_in_index=False
        )
        cluster = MinhashDedupCluster(str(work / "pairs"), str(work / "found"), near)
        return [
            Stage("hashing", [*first, signature]),
            Stage("comparing", [pairs], near.num_buckets),
            Stage("clustering", [cluster], 1),
        ]
    return []


def duplicates(folder: Path, options: Options, report: pipeline.Report) -> list[PipelineStep]:
    """The block that drops what ``stages`` found."""
    found, dropped = str(folder / "dedup" / "found"), Dropped(report, "duplicate")
    if options.dedup == "exact":
        exact = ExactDedupConfig(content_getter=_text, document_priority=_priority)
        return [ExactDedupFilter(found, exact, dropped)]
    if options.dedup == "minhash":
        return [MinhashDedupFilter(found, dropped)]
    return []


def renew(folder: Path, plan: parts.Plan) -> None:
    """Forget what was found in other inputs; a duplicate may stand in any of them."""
    work, mark = folder / "dedup", folder / "dedup" / "plan"
    if not mark.is_file() or mark.read_text() != plan.fingerprint():
        for name in ("hashing", "comparing", "clustering"):
            shutil.rmtree(folder / "logs" / name, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    (work / "found").mkdir(parents=True, exist_ok=True)
    mark.write_text(plan.fingerprint())
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 32
    if len(plan.spans) > room:  # datatrove's comparing steps open the signatures of all parts at once
        raise DataError(f"--dedup opens {len(plan.spans)} files at once, {room} are allowed; raise it with ulimit -n")
