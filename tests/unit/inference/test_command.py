"""``lightnet generate`` beyond one prompt: files of prompts, states kept, what is typed."""

import errno
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lightnet_llm.cli import main
from lightnet_llm.inference import Loaded, Sampling, TextStream, cache, complete


def command(*arguments: str, **options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["generate", *arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_prompts_of_a_file_are_answered_in_order(run: Path, loaded: Loaded, tmp_path: Path) -> None:
    prompts = ["the sea", "", "a keeper writes to an old friend", "naïve 水"]
    lines, records = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("\n".join(prompts) + "\n")
    records.write_text("\n".join([json.dumps({"prompt": text, "id": 1}) for text in prompts[:2]] + ["", '"x y"']))
    assert loaded.tokenizer is not None
    ids = [[1, *loaded.tokenizer.encode(text)] for text in prompts]
    wanted = complete(loaded.model, loaded.tokenizer, ids, 9, Sampling(seed=4))
    for size in ("1", "3"):
        options = ["--max-tokens", "9", "--seed", "4", "--batch-size", size]
        code, out, err = command(str(run), "--prompts", str(lines), *options)
        found = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [fact["prompt"] for fact in found] == prompts, err
        assert [fact["ids"] for fact in found] == [item.ids for item in wanted]
        assert [fact["text"] for fact in found] == [item.text for item in wanted]
    target = tmp_path / "out.jsonl"
    code, out, _ = command(str(run), "--prompts", str(records), "--max-tokens", "3", "--output", str(target))
    assert code == 0 and out == "" and len(target.read_text().splitlines()) == 3
    code, out, _ = command(str(run), "--prompts", str(lines), "--max-tokens", "9", "--stop", " ", "--greedy")
    assert code == 0 and all(" " not in json.loads(line)["text"] for line in out.splitlines())


def test_a_kept_state_stands_for_its_text(run: Path, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    code, whole, _ = command(str(run), "--prompt", "the sea", "--max-tokens", "20", "--greedy")
    code, first, err = command(str(run), "--prompt", "the sea", "--max-tokens", "12", "--greedy", "--save-state", state)
    assert code == 0, err
    code, rest, err = command(str(run), "--prompt", "", "--max-tokens", "8", "--greedy", "--state", state)
    assert code == 0 and first[:-1] + rest == whole, err


def test_what_cannot_be_written_leaves_what_was_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: object, *_: object, **__: object) -> None:
        with Path(str(path)).open("wb") as file:
            file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    prompts, answers, state = tmp_path / "p.txt", tmp_path / "answers", tmp_path / "state"
    prompts.write_text("the sea\n")
    answers.write_text("older\n")
    assert command(str(run), "--prompt", "the", "--max-tokens", "1", "--save-state", str(state))[0] == 0
    older = state.read_bytes()
    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(cache, "save_file", lambda tensors, path, facts: full(path))
    for arguments in (
        ["--prompts", str(prompts), "--output", str(answers)],
        ["--prompt", "a", "--save-state", str(state)],
    ):
        code, _, err = command(str(run), *arguments, "--max-tokens", "2")
        assert code == 1 and "No space left on device" in err and err.count("\n") == 1, err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers", "p.txt", "state"]
    assert answers.read_bytes() == b"older\n" and state.read_bytes() == older


def test_typed_prompts_go_on_the_text(run: Path, loaded: Loaded) -> None:
    options = ["--interactive", "--max-tokens", "6", "--greedy"]
    code, out, _ = command(str(run), *options, input="the sea\n ship\n\nthe sea\n")
    first, second, third = (line.removeprefix("> ") for line in out.replace("> > ", "> ").split("\n")[:3])
    assert code == 0 and first == third
    assert loaded.tokenizer is not None
    before = TextStream(loaded.model, loaded.tokenizer, "the sea", 6, Sampling(greedy=True))
    assert "".join(before) == first
    after = TextStream(loaded.model, loaded.tokenizer, " ship", 6, Sampling(greedy=True), before.cache())
    assert "".join(after) == second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "/nowhere/p.txt"], "/nowhere/p.txt: cannot be read"),
        (["--prompts", "EMPTY"], "holds no prompt"),
        (["--prompts", "BAD.jsonl"], "line 1: has no string 'prompt'"),
        (["--prompts", "WORSE.jsonl"], "line 1: not JSON"),
        (["--prompts", "HALF.jsonl"], "line 1: its 'prompt' holds half a character"),
        (["--prompts", "p", "--echo"], "--echo goes with --prompt or --prompt-file"),
        (["--prompts", "p", "--prompt", "x"], "give either --prompt"),
        (["--prompt", "x", "--stop", "y"], "--stop goes with --prompts"),
        (["--prompt", "x", "--output", "y"], "--output goes with --prompts"),
        (["--interactive", "--save-state", "y"], "--save-state goes with --prompt"),
        (["--prompt", "x", "--state", "/nowhere/state"], "/nowhere/state: no such file"),
        (["--prompt", "x", "--save-state", "/nowhere/state"], "--save-state /nowhere/state: cannot be written"),
        (["--prompts", "p", "--output", "/dev/null"], "--output /dev/null: cannot be written"),
    ],
)
def test_errors_are_one_line(run: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "BAD.jsonl").write_text("[1]\n")
    (tmp_path / "WORSE.jsonl").write_text("{\n")
    (tmp_path / "HALF.jsonl").write_text('{"prompt": "a\\ud800"}\n')
    given = [str(tmp_path / name) if name.isupper() or name.endswith(".jsonl") else name for name in arguments]
    code, _, err = command(str(run), *given)
    assert code == 1 and err.startswith("error: ") and message in err and err.count("\n") == 1, err
