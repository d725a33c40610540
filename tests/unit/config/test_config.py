"""Configuration: presets load, mistakes are refused in one line, what is resolved loads again."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lightnet_llm.cli import main
from lightnet_llm.config import RunConfig, dump_config, load_config, preset_names, validate
from lightnet_llm.config.deepspeed import deepspeed_config
from lightnet_llm.errors import UserError
from lightnet_llm.models import build_model
from lightnet_llm.parallel.stages import PartLayers

SMALL = """
model: {layers: 2, width: 32, heads: 2, glu_width: 64, vocab_size: 100}
train: {steps: 10, global_batch: 8, micro_batch: 2}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_round_trips(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(config))
    assert load_config(str(path)) == config


def test_every_field_has_a_sentence() -> None:
    def walk(section: type) -> None:
        for name, field in section.model_fields.items():  # type: ignore[attr-defined]
            inner = field.annotation
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                walk(inner)
            else:
                assert field.description and field.description.endswith("."), f"{section.__name__}.{name}"

    walk(RunConfig)


MISTAKES = [
    (["modle.layers=3"], "unknown key 'modle' (did you mean 'model'?)"),
    (["train.stepz=3"], "unknown key 'train.stepz' (did you mean 'steps'?)"),
    (["model.layers=none"], "'model.layers' is 'none'"),
    (["model.layers=0"], "'model.layers' is 0"),
    (["model.heads=3"], "heads 3 must divide width 32; the nearest that does is 2"),
    (["model.width=512", "model.heads=2"], "above 128; use heads: 4"),
    (["parallel.tensor=4"], "parallel.tensor 4 must divide model.heads 2; legal on 4 ranks: parallel.tensor=2, or "),
    (
        ["parallel.pipeline=3"],
        "pipeline 3 x sequence 1 = 3 does not divide 4 ranks; legal on 4 ranks: parallel.pipeline=2",
    ),
    (["parallel.pipeline=4"], "parallel.pipeline 4 is more than model.layers 2; legal on 4 ranks: parallel.pipeline=2"),
    (["parallel.pipeline=2", "parallel.zero_stage=2"], "takes zero_stage: 1; legal on 4 ranks: parallel.zero_stage=1"),
    (["parallel.zero_stage=4"], "parallel.zero_stage"),
    (["train.tokens=100", "train.steps=3"], "keep one"),
    (["train.steps=null"], "no budget"),
    (["train.batch_ramp=[{until_step: 5, batch: 2},{until_step: 3, batch: 4}]"], "until_step 3 must be above 5"),
    (["model.axes=2"], "a causal model has one axis"),
    (["model.dropout=1.0"], "model.dropout"),
    (["optimizer.betas=[0.9,1.0]"], "must lie in [0, 1)"),
    (
        ["train.precision=bf16", "deepspeed.prescale_gradients=true"],
        "deepspeed.prescale_gradients has no effect in bf16 at ZeRO 0 and 1",
    ),
    (["deepspeed.fp16.enabled=true"], "deepspeed.fp16 is derived; set train.precision instead"),
    (["deepspeed.zero_optimization=5"], "deepspeed.zero_optimization: 5 is no mapping; name a field of it"),
    (["deepspeed.zero_optimization.stage=3"], "set parallel.zero_stage instead"),
    (["x"], "override 'x' is not of the form key=value"),
    (["train.seed=[1"], "small.yaml: "),
    (["optimizer.learning_rate=.inf"], "'optimizer.learning_rate' is inf"),
    (["train.steps=null", "train.hours=.inf"], "'train.hours' is inf"),
    (["train.name=../other"], "'../other' is not the name of one folder; train.output says where it lies"),
    (["train.name=''"], "'' is not the name of one folder"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES)
def test_mistake_is_one_line(overrides: list[str], message: str, small: Path) -> None:
    result = CliRunner().invoke(main, ["train", str(small), "--dry-run", "--gpus", "4", *overrides])
    assert result.exit_code == 1
    lines = result.output.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], result.output


FILES = [
    ("model: [1, 2\n", "bad.yaml:2: not valid YAML"),
    ("- a\n- b\n", "must hold a mapping"),
    ("model: {layers: 2}\n", "is missing"),
    ("extends: nowhere\n", "neither a file nor a preset"),
    ("extends: bad.yaml\n", "runs in a circle"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_bad_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r".*") as error:
        load_config(str(path))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_unknown_preset_suggests() -> None:
    with pytest.raises(UserError, match="did you mean 'lm/pile_1b'"):
        load_config("pile_1")


def test_extends_and_overrides(small: Path) -> None:
    child = small.with_name("child.yaml")
    child.write_text("extends: small.yaml\nmodel: {tpe: false}\n")
    config = load_config(str(child), ["train.tokens=1_000_000", "optimizer.learning_rate=1e-3"])
    assert (config.model.width, config.model.tpe, config.train.name) == (32, False, "child")
    assert (config.train.steps, config.train.tokens, config.optimizer.learning_rate) == (None, 1_000_000, 1e-3)


def test_deepspeed_configuration(small: Path) -> None:
    config = load_config(str(small), ["deepspeed.zero_optimization.overlap_comm=true", "parallel.zero_stage=2"])
    derived = deepspeed_config(config, data_parallel=2)
    assert derived["gradient_accumulation_steps"] == 2 and derived["train_batch_size"] == 8
    assert derived["zero_optimization"]["stage"] == 2 and derived["zero_optimization"]["overlap_comm"] is True
    assert derived["data_types"] == {"grad_accum_dtype": "fp32"}
    with pytest.raises(UserError, match=r"set optimizer.clip instead"):
        deepspeed_config(load_config(str(small), ["deepspeed.gradient_clipping=1"]), 1)


@pytest.mark.parametrize(
    ("name", "tensor", "more"),
    [
        ("pile_2.9b", 1, []),
        ("pile_2.9b", 2, ["model.decay=independent"]),
        ("pile_379m", 1, []),
        ("diffuse/xlarge", 1, []),
        ("diffuse/xlarge", 1, ["model.conditioning=adaln_single"]),
    ],
)
def test_stage_3_gathers_the_next_block_whole(name: str, tensor: int, more: list[str]) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config

    config = load_config(name, ["model.layers=1", "parallel.zero_stage=3", f"parallel.tensor={tensor}", *more])
    zero = deepspeed_config(config, 1)["zero_optimization"]
    with torch.device("meta"):
        model = build_model(config.model, PartLayers(tensor))
    leaves = apply_zero_leaf_module_config(model, DeepSpeedZeroConfig(**zero).leaf_module)
    assert leaves == [model.layers[0]]
    sizes = [p.numel() for p in model.layers[0].parameters() if p.numel() > 100_000]  # smaller ones stay gathered
    assert zero["stage3_prefetch_bucket_size"] > sum(sizes) - min(sizes)


def test_batch_that_does_not_divide(small: Path) -> None:
    result = CliRunner().invoke(main, ["train", str(small), "--dry-run", "--gpus", "3"])
    assert result.exit_code == 1 and "nearest that is: 6" in result.output
    result = CliRunner().invoke(main, ["train", str(small), "--dry-run", "--gpus", "8"])
    assert result.exit_code == 1 and "train.micro_batch=1 keeps the batch" in result.output


def test_dry_run_says_which_rank_holds_what(small: Path) -> None:
    result = CliRunner().invoke(main, ["train", str(small), "--dry-run", "--gpus", "4", "parallel.tensor=2"])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["rank", "stage", "tensor", "sequence", "data"] in [row[:5] for row in rows]
    assert next(row for row in rows if row[0] == "3")[:5] == ["3", "0", "1", "0", "1"]
    assert result.output.count("would not start: data.path is not set") == 1


HOSTFILES = [
    ("", "names no host"),
    ("a slots=2\nb\n", ":2: 'b' is not"),
    ("a slots=two\n", ":1: 'a slots=two' is not"),
    ("a slots=2\na slots=2\n", ":2: 'a slots=2'"),
]


@pytest.mark.parametrize(("text", "message"), HOSTFILES)
def test_bad_hostfile(text: str, message: str, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    result = CliRunner().invoke(main, ["train", str(small), "--dry-run", "--hostfile", str(path)])
    assert result.exit_code == 1 and message in result.output


def test_training_needs_data_before_any_work(small: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["train", str(small), f"train.output={tmp_path}/runs"])
    assert result.exit_code == 1 and "data.path is not set" in result.output
    assert not (tmp_path / "runs").exists()


def test_a_field_named_by_a_keyword_of_python(tmp_path: Path, small: Path) -> None:
    config = load_config(str(small), ["checkpoint.async=true"])
    assert config.checkpoint.asynchronous and "async: true" in dump_config(config)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "again.yaml")).checkpoint.asynchronous
    with pytest.raises(UserError, match=r"unknown key 'checkpoint.asinc'.*async"):
        load_config(str(small), ["checkpoint.asinc=true"])


def test_validate_names_its_source() -> None:
    with pytest.raises(UserError, match=r"^here: "):
        validate({"model": {}}, "here")


def test_documentation_lists_every_field() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    scope: dict[str, object] = {"__name__": "page", "__file__": str(docs / "make_configuration.py")}
    exec((docs / "make_configuration.py").read_text(), scope)
    assert (docs / "configuration.md").read_text() == scope["page"](), "run python docs/make_configuration.py"  # type: ignore[operator]


def test_vocabulary_smaller_than_the_tokenizers(small: Path, tmp_path: Path) -> None:
    from lightnet_data import manifest

    (tmp_path / "data").mkdir()
    facts = {"format": manifest.FORMAT, "format_version": 1, "tokenizer": {"vocab_size": 101, "eod_id": 0}}
    manifest.save(tmp_path / "data", facts)
    arguments = ["train", str(small), f"data.path={tmp_path}/data", f"train.output={tmp_path}/runs", "--gpus", "1"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1 and "set model.vocab_size=101 or more" in result.output
    assert not (tmp_path / "runs").exists()
