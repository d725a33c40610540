"""What doctor finds, here and on machines that lack something."""

import importlib
import json
from typing import Any

import pytest
from click.testing import CliRunner

from lightnet_llm.cli import main

doctor = importlib.import_module("lightnet_llm.cli.doctor")  # the module; the command in it has the same name


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without the imports that take seconds."""
    monkeypatch.setattr(doctor, "IMPORTS", ("json",))
    return monkeypatch


def test_here_everything_required_works() -> None:
    code, out = run("--json")
    found = json.loads(out)
    assert code == 0 and found["ok"] and found["problems"] == []
    assert found["versions"]["torch"] and found["versions"]["lightnet-llm"]
    assert found["imports"] == {"deepspeed": "ok", "megatron.core": "ok"}
    assert found["backends"]["reference"]["cpu"].startswith("ok")
    assert found["backends"]["torch"]["cpu"].startswith("ok")
    assert set(found["extras"]) >= {"eval", "vision", "triton", "dev"}


def test_page_for_people(quick: pytest.MonkeyPatch) -> None:
    code, out = run()
    assert code == 0 and "torch on cpu: ok" in out and "all that training needs works" in out


def test_extras_say_what_they_lack(quick: pytest.MonkeyPatch) -> None:
    lines = ["torch>=1", 'nosuchpackage>=3; extra == "eval"', 'torch>=999; extra == "vision"', 'click; extra == "dev"']
    quick.setattr(doctor.metadata, "requires", lambda name: lines)
    code, out = run("--json")
    extras = json.loads(out)["extras"]
    assert code == 0
    assert extras["eval"] == {"complete": False, "missing": ["nosuchpackage>=3: is not installed"]}
    assert "does not satisfy >=999" in extras["vision"]["missing"][0]
    assert extras["dev"]["complete"]


@pytest.mark.parametrize("line", ["nosuchpackage>=3", "torch>=999"])
def test_a_missing_requirement_is_broken(quick: pytest.MonkeyPatch, line: str) -> None:
    quick.setattr(doctor.metadata, "requires", lambda name: [line])
    code, out = run()
    assert code == 1 and "problem: " in out and f"pip install '{line}'" in out


def _raises(backend: str, device: str) -> float:
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize("broken", [_raises, lambda backend, device: 0.5])
def test_a_broken_scan_is_broken(quick: pytest.MonkeyPatch, broken: Any) -> None:
    quick.setattr(doctor, "self_test", broken)
    code, out = run()
    assert code == 1 and "problem: scan, backend torch on cpu:" in out


def test_an_import_that_fails_or_crashes_is_broken(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(doctor, "IMPORTS", ("nosuchmodule", "json"))
    code, out = run("--json")
    assert code == 1 and json.loads(out)["imports"]["json"] == "ok"
    assert "ModuleNotFoundError" in json.loads(out)["imports"]["nosuchmodule"]


def test_self_test_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightnet_kernels

    right = lightnet_kernels.additive_scan

    def wrong(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return right(query, key if options["backend"] == "reference" else key.detach() + 0 * key, value, **options)

    assert doctor.self_test("torch", "cpu") < 1e-4
    monkeypatch.setattr(lightnet_kernels, "additive_scan", wrong)
    assert doctor.self_test("torch", "cpu") > 0.1
