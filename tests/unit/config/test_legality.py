"""Layouts: each is legal, or refused in one line that names the nearest that are."""

import re

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightnet_llm.config import RunConfig, validate
from lightnet_llm.errors import UserError
from lightnet_llm.parallel.legality import changed, choice_of, choices, legal_layout, problem, shown


def run_config(
    heads: int = 4, layers: int = 4, length: int = 64, batch: int = 8, micro: int = 2, **parallel: object
) -> RunConfig:
    return validate(
        {
            "model": {"layers": layers, "width": 16 * heads, "heads": heads, "glu_width": 90, "vocab_size": 251},
            "train": {"steps": 1, "global_batch": batch, "micro_batch": micro},
            "data": {"sequence_length": length},
            "parallel": parallel,
        },
        "here",
    )


size = st.integers(1, 9)
configs = st.builds(
    run_config,
    heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    layers=st.integers(1, 6),
    length=st.sampled_from([1, 5, 63, 64, 2048]),
    batch=st.sampled_from([1, 4, 8, 24, 96]),
    micro=st.sampled_from([1, 2, 3]),
    tensor=size,
    pipeline=size,
    sequence=size,
    zero_stage=st.integers(0, 3),
    tensor_sequence_parallel=st.booleans(),
)


@settings(deadline=None, max_examples=300)
@given(config=configs, world=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 64]))
def test_legal_or_refused_with_the_nearest(config: RunConfig, world: int) -> None:
    own = choice_of(config)
    try:
        layout = legal_layout(config, world)
    except UserError as error:
        message = str(error)
        assert problem(config, own, world) and message.startswith(str(problem(config, own, world)))
        assert "\n" not in message and error.shared
        near = shown(config, world)
        if not near:
            assert "no layout of this run is legal" in message
            return
        named = re.search(rf"; legal on {world} ranks: ([^;]*)", message)
        assert named
        for text, choice in zip(named.group(1).split(", or "), near, strict=True):
            given_back = config.model_dump()
            for item in text.split():
                field, value = item.removeprefix("parallel.").split("=")
                given_back["parallel"][field] = yaml.safe_load(value)
            again = RunConfig.model_validate(given_back)
            assert choice_of(again) == choice
            assert legal_layout(again, world).world == world  # what is named runs
        least = min(len(changed(own, c)) for c in choices(config, world) if problem(config, c, world) is None)
        assert len(changed(own, near[0])) == least  # and nothing nearer does
    else:
        assert layout.world == world and problem(config, own, world) is None


@given(config=configs, world=st.sampled_from([1, 2, 4, 8]))
def test_what_is_legal_has_no_part_left_over(config: RunConfig, world: int) -> None:
    own = choice_of(config)
    assume(problem(config, own, world) is None)
    data = world // own.model
    assert own.model * data == world and config.model.heads % own.tensor == 0
    assert config.train.global_batch % (config.train.micro_batch * data) == 0
    assert own.pipeline == 1 or (own.zero_stage == 1 and own.pipeline <= config.model.layers)
    if own.tensor_sequence_parallel:
        rank_tokens = config.train.micro_batch * -(-config.data.sequence_length // own.sequence)
        assert rank_tokens % own.tensor == 0


REFUSED = [
    (
        {"tensor": 3},
        8,
        "sequence 1 = 3 does not divide 8 ranks; legal on 8 ranks: parallel.tensor=4, or parallel.tensor=2, or ",
    ),
    ({"tensor": 3}, 3, "must divide model.heads 4; legal on 3 ranks: parallel.tensor=1 parallel.pipeline=3, or "),
    ({"tensor": 8}, 8, "must divide model.heads 4; legal on 8 ranks: parallel.tensor=4"),
    ({"pipeline": 2, "zero_stage": 3}, 4, "legal on 4 ranks: parallel.zero_stage=1, or parallel.pipeline=1"),
    ({"pipeline": 8}, 8, "is more than model.layers 4; legal on 8 ranks: parallel.pipeline=4"),
    ({}, 8, "train.global_batch 8 is not a multiple of train.micro_batch 2 x data-parallel size 8 = 16; the nearest"),
    ({"tensor": 2, "pipeline": 2, "sequence": 3}, 8, "or use 12 ranks"),
    ({"batch": 3}, 7, "the nearest that is: 14; no layout of this run is legal on 7 ranks"),
    ({"sequence": 128}, 128, "more than data.sequence_length 64"),
    (
        {"tensor": 4, "sequence": 2, "tensor_sequence_parallel": True, "length": 30},
        8,
        "parallel.tensor 4 must divide the 30 tokens that a rank has of train.micro_batch 2; legal on 8 ranks: "
        "parallel.tensor_sequence_parallel=false, or parallel.sequence=1, or parallel.tensor=2",
    ),
]


IMAGES = {
    "model.causal": False,
    "model.axes": 2,
    "model.vocab_size": 0,
    "model.image": {"size": [8, 8], "patch": 2, "classes": 3},
    "data.sequence_length": 16,
}
MODELS = [
    (
        {"model.mixer": "softmax", "model.lrpe": False, "parallel.sequence": 2},
        "and model.mixer: softmax has none; legal on 2",
    ),
    (
        {"model.drop_path": 0.1, "parallel.tensor": 2, "parallel.tensor_sequence_parallel": True},
        "splits samples, which model.drop_path leaves out as a whole; legal on 2 ranks: parallel.tensor_sequence_parallel=false",
    ),
    (
        {**IMAGES, "model.head": "classifier", "parallel.tensor": 2, "parallel.tensor_sequence_parallel": True},
        "shares rows of text; head: classifier has images; legal on 2 ranks: parallel.tensor_sequence_parallel=false",
    ),
    (
        {**IMAGES, "model.head": "denoiser", "data.sequence_length": 18, "parallel.pipeline": 2},
        "parallel.pipeline 2: head: denoiser has no stages; legal on 2 ranks: parallel.pipeline=1",
    ),
]


@pytest.mark.parametrize(("fields", "message"), MODELS)
def test_models_that_layouts_do_not_take(fields: dict[str, object], message: str) -> None:
    tree = run_config().model_dump()
    for name, value in fields.items():
        section, field = name.split(".")
        tree[section][field] = value
    with pytest.raises(UserError) as error:
        legal_layout(validate(tree, "here"), 2)
    assert message in str(error.value)


@pytest.mark.parametrize(("parallel", "world", "message"), REFUSED)
def test_refused_in_these_words(parallel: dict[str, object], world: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        legal_layout(run_config(**parallel), world)  # type: ignore[arg-type]
    assert message in str(error.value)
