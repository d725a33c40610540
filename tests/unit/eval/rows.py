"""A few rows of each of eight tasks, in the hub's form, made up for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _choices(*texts: str) -> dict[str, list[str]]:
    return {"text": list(texts), "label": ["A", "B", "C", "D"][: len(texts)]}


ROWS: dict[str, list[dict[str, Any]]] = {
    "piqa.validation": [
        {"goal": "To cross the sea,", "sol1": "take a ship.", "sol2": "take a chair.", "label": 0},
        {"goal": "To write a letter,", "sol1": "use a spoon.", "sol2": "use a pen.", "label": 1},
        {"goal": "To see at night,", "sol1": "light a lamp.", "sol2": "close your eyes.", "label": 0},
    ],
    "hellaswag.validation": [
        {
            "ind": 1,
            "activity_label": "Sailing",
            "ctx_a": "A keeper stands at the harbour.",
            "ctx_b": "he",
            "ctx": "A keeper stands at the harbour. he",
            "endings": ["waves at a ship.", "eats the sea.", "is a lamp [title] of snow.", "sails under a letter."],
            "source_id": "made up",
            "split": "val",
            "split_type": "indomain",
            "label": "0",
        },
        {
            "ind": 2,
            "activity_label": "Writing",
            "ctx_a": "A friend opens a book.",
            "ctx_b": "",
            "ctx": "A friend opens a book.",
            "endings": ["The book reads him.", "He reads a page.", "He sails it.", "The page is a harbour."],
            "source_id": "made up",
            "split": "val",
            "split_type": "indomain",
            "label": "1",
        },
    ],
    "winogrande.validation": [
        {"sentence": "The ship beat the boat as the _ was fast.", "option1": "ship", "option2": "boat", "answer": "1"},
        {"sentence": "Ann helped Bea because _ was tired.", "option1": "Ann", "option2": "Bea", "answer": "2"},
    ],
    "arc_easy.test": [
        {"id": "1", "question": "What is wet?", "choices": _choices("the sea", "sand", "fire"), "answerKey": "A"},
        {"id": "2", "question": "What flies?", "choices": _choices("a stone", "a bird"), "answerKey": "B"},
    ],
    "arc_challenge.test": [
        {"id": "3", "question": "What pulls tides?", "choices": _choices("salt", "the moon", "wind"), "answerKey": "B"}
    ],
    "openbookqa.test": [
        {"id": "4", "question_stem": "A lighthouse is for", "choices": _choices("ships", "fish"), "answerKey": "A"}
    ],
    "boolq.validation": [
        {"passage": "The harbour is old.", "question": "is the harbour new", "idx": 0, "label": 0},
        {"passage": "Ships sail.", "question": "do ships sail", "idx": 1, "label": 1},
    ],
    "sciq.validation": [
        {
            "question": "What is frozen water?",
            "distractor1": "steam",
            "distractor2": "salt",
            "distractor3": "sand",
            "correct_answer": "ice",
            "support": "Water that is cold is ice.",
        },
        {
            "question": "What do plants need?",
            "distractor1": "noise",
            "distractor2": "iron",
            "distractor3": "glass",
            "correct_answer": "light",
            "support": "",
        },
    ],
}


def write(folder: Path) -> Path:
    """The files that ``lightnet eval --offline`` reads."""
    folder.mkdir(exist_ok=True)
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder
