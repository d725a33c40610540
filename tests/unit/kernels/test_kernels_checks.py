"""Boundaries of segments are looked at once."""

import torch
from lightnet_kernels import checks


def test_boundaries_of_several_micro_batches_are_looked_at_once(monkeypatch):
    looked, plain = [], checks._checked
    monkeypatch.setattr(checks, "_met", ())
    monkeypatch.setattr(checks, "_checked", lambda *given: looked.append(given[1]) or plain(*given))
    batches = [torch.tensor([0, end, 9], dtype=torch.int32) for end in range(1, 5)]
    for _ in range(3):
        for end, bounds in enumerate(batches, 1):
            assert checks.check_cu_seqlens("scan", bounds, 1, 9) == [0, end, 9]
    assert len(looked) == 4
    batches[0][1] = 7
    assert checks.check_cu_seqlens("scan", batches[0], 1, 9) == [0, 7, 9]
    assert len(looked) == 5
    for end in range(checks.MET):
        checks.check_cu_seqlens("scan", torch.tensor([0, end, 9]), 1, 9)
    assert len(checks._met) == checks.MET
    checks.check_cu_seqlens("scan", batches[1], 1, 9)
    assert len(looked) == 6 + checks.MET  # it had been forgotten
