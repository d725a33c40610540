"""What a launch takes, part by part."""

import pytest

from lightnet_llm.launch import times


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(times.time, "time", lambda: now[0])
    monkeypatch.setattr(times, "current", times.current)
    monkeypatch.delenv(times.VARIABLE, raising=False)
    return now


def test_parts_add_up_and_are_told_once(clock, monkeypatch):
    monkeypatch.setenv(times.VARIABLE, "990.5")
    times.begin()
    clock[0] = 1003.0
    times.current.mark("imports")
    assert times.current.taken() == {"launch_seconds": {"processes": 9.5, "imports": 3.0, "total": 12.5}}
    assert times.current.taken() == {}


@pytest.mark.parametrize("given", ["1010", "soon", None])
def test_another_hosts_clock_or_launcher(clock, monkeypatch, given):
    """Nothing is negative, and nothing is made up."""
    if given is not None:
        monkeypatch.setenv(times.VARIABLE, given)
    times.begin()
    clock[0] = 1002.0
    times.current.mark("imports")
    found = times.current.taken()["launch_seconds"]
    assert found == {**({"processes": 0.0} if given == "1010" else {}), "imports": 2.0, "total": 2.0}
