"""Trained by every layout, converted, and held against the parallel model's own logits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lightnet_llm.convert import convert, open_source
from tests.conftest import Ranks

slow = pytest.mark.slow
CASES = {
    "tp1": (1, []),
    "tp2_untied": (2, ["parallel.tensor=2", "model.tie_embeddings=false", "model.glu_width=91"]),
    "tp4": (4, ["parallel.tensor=4"]),  # GLU 90 is padded to 92, vocabulary 251 to 512
    "pp2": (2, ["parallel.pipeline=2"]),
    "pp2_untied": (2, ["parallel.pipeline=2", "model.tie_embeddings=false", "model.norm=layer"]),
    "tp2_bf16": (2, ["parallel.tensor=2", "train.precision=bf16"]),
    "zero3_bf16": (2, ["parallel.zero_stage=3", "train.precision=bf16"]),
    "no_share": (1, ["model.decay=independent", "model.decay_rank=8"]),
    "tp4_seven": (4, ["parallel.tensor=4", "model.vocab_size=7"]),
}
EXACT = ["train.precision=fp32", "train.steps=1", "optimizer.learning_rate=1e-30"]  # a step that moves no weight
QUICK = ("tp2_untied", "pp2")


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The tiny configuration on a vocabulary of 7."""
    from lightnet_data import manifest
    from lightnet_data.storage import indexed_dataset

    folder = tmp_path_factory.mktemp("seven")
    facts = manifest.load(tiny.parent / "data")
    facts["tokenizer"] = {"vocab_size": 7, "eod_id": 0}
    random, module = np.random.default_rng(0), indexed_dataset()
    for split in ("train", "validation"):
        builder = module.IndexedDatasetBuilder(str(folder / f"{split}.bin"), dtype=np.uint16)
        for _ in range(200):
            tokens = np.append(np.arange(int(random.integers(8, 90))) % 6 + 1, 0)
            builder.add_document(tokens.astype(np.uint16), [len(tokens)])
        builder.finalize(str(folder / f"{split}.idx"))
    manifest.save(folder, facts)
    config = folder / "seven.yaml"
    config.write_text(tiny.read_text().replace(str(tiny.parent / "data"), str(folder)))
    return config


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=slow) for n in CASES])
def test_logits_of_the_parallel_model(name: str, ranks: Ranks, tiny: Path, seven: Path, tmp_path: Path) -> None:
    world, overrides = CASES[name]
    config = seven if "seven" in name else tiny
    arguments = ["--config", str(config), f"train.output={tmp_path}", "train.name=run", *overrides]
    codes = ranks.run(world, arguments, tmp_path / "log", "dump_logits", LOGITS=str(tmp_path / "logits"))
    assert codes == [0] * world, (tmp_path / "log.rank0").read_text()[-2000:]
    report = convert(tmp_path / "run", tmp_path / "hf", "hf")
    half = "bf16" in name
    rounded = half and "zero3" not in name  # stage 3 keeps fp32 weights, and computes in bf16
    assert report.dtype == ("bfloat16" if rounded else "float32")
    from lightnet_llm import LightNetForCausalLM

    model = LightNetForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert model.model.embedding.weight.shape[0] == model.config.vocab_size  # without padding
    seen, wanted = torch.load(tmp_path / "logits.in"), torch.load(tmp_path / "logits.out").float()
    with torch.inference_mode():
        logits = model(seen["ids"], cu_seqlens=seen["cu_seqlens"], use_cache=False).logits.float()
    assert logits.shape[-1] == model.config.vocab_size
    scale = float(wanted.abs().max())
    assert scale > 1  # trained: not all alike
    assert float((logits.view_as(wanted) - wanted).abs().max()) <= (2e-2 * scale if half else 1e-5)
    # Back, and there again: the same bytes. And training starts from it, on another layout.
    convert(tmp_path / "hf", tmp_path / "back", "training")
    convert(tmp_path / "back", tmp_path / "again", "hf")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "hf" / "model.safetensors"
    ).read_bytes()
    weights, own = open_source(tmp_path / "back").weights, open_source(tmp_path / "run").weights
    for tensor in own.shapes:
        assert (
            torch.equal(weights.read(tensor), own.read(tensor)) and weights.read(tensor).dtype == own.read(tensor).dtype
        )
    start = [f"train.init_from={tmp_path / 'back'}", *(o for o in overrides if not o.startswith("parallel"))]
    first = ranks.train(2, config, [*start, "train.steps=1", "parallel.tensor=2"], tmp_path, "second")[0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert first["loss"] < losses[-1] + 0.3 < losses[0] - 0.3
    if half:  # the weights trained in bf16, by the parallel model in fp32
        exact = [*start, *EXACT, f"train.output={tmp_path}", "train.name=exact", "parallel.tensor=2"]
        codes = ranks.run(
            2, ["--config", str(config), *exact], tmp_path / "log", "dump_logits", LOGITS=str(tmp_path / "l")
        )
        assert codes == [0, 0], (tmp_path / "log.rank0").read_text()[-2000:]
        seen, wanted = torch.load(tmp_path / "l.in"), torch.load(tmp_path / "l.out")
        model = LightNetForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = model(seen["ids"], cu_seqlens=seen["cu_seqlens"], use_cache=False).logits
        assert wanted.dtype == torch.float32 and float((logits.view_as(wanted) - wanted).abs().max()) <= 1e-5
    if not rounded:
        return
    masters = convert(tmp_path / "run", tmp_path / "masters", "hf", dtype="float32", trust_pickle=True)
    assert masters.masters and 0 < masters.rounding < 0.1 and masters.dtype == "float32"
    fine, coarse = open_source(tmp_path / "masters").weights, open_source(tmp_path / "run").weights
    for tensor in coarse.shapes:
        assert torch.equal(fine.read(tensor).to(coarse.read(tensor).dtype), coarse.read(tensor))
    assert any(not torch.equal(fine.read(n), coarse.read(n).float()) for n in coarse.shapes)
