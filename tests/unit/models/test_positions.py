"""MD-TPE on grids and the frequency ladders of MD-LRPE."""

import pytest
import torch

from lightnet_llm.config import ModelConfig
from lightnet_llm.models import ForwardContext, initialize
from lightnet_llm.models.lrpe import frequency_ladder
from lightnet_llm.models.tpe import ToeplitzEncoding

GRIDS = [(5,), (3, 4), (1, 6), (2, 3, 4)]


def config(**changes: object) -> ModelConfig:
    base = {"layers": 1, "width": 24, "heads": 2, "glu_width": 8, "vocab_size": 8, "tpe_rank": 3, "causal": False}
    return ModelConfig.model_validate({**base, "tpe_init_length": 6, **changes})


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_tpe_on_a_grid_equals_its_definition(grid: tuple[int, ...], mirrored: bool) -> None:
    """x + sum over axes of an explicit Toeplitz product along the axis (paper eq. of MD-TPE, model-spec 3)."""
    module = ToeplitzEncoding(config(axes=len(grid), tpe_bidirectional=mirrored)).double()
    initialize(module, 0)
    count = int(torch.tensor(grid).prod())
    x = torch.randn(2, count, 24, dtype=torch.float64)
    out, _ = module(x, ForwardContext(), grid=grid)
    cube = x.view(2, *grid, 24)
    expected = cube.clone()
    for axis, size in enumerate(grid):
        decay = torch.sigmoid(module.raw[axis])
        gain = module.beta[axis] * (1 - decay) / (1 + decay if mirrored else 1)
        lag = torch.arange(size)[:, None] - torch.arange(size)[None, :]
        powers = decay[..., None, None] ** lag.abs() * gain[..., None, None]
        matrix = powers.sum(1)  # [width, n, m]
        if not mirrored:
            matrix = matrix * (lag >= 0)
        rows = cube.movedim(axis + 1, -2)
        expected += torch.einsum("dnm,...md->...nd", matrix, rows).movedim(-2, axis + 1)
    assert (out.view(expected.shape) - expected).abs().max() < 1e-11


def test_ladders() -> None:
    across = frequency_ladder(config()).flatten().double()
    assert torch.allclose(across, 10000 ** (-2 * torch.arange(24).double() / 24), rtol=1e-6)
    per_head = frequency_ladder(config(lrpe_ladder="per_head")).double()
    assert torch.equal(per_head[0], per_head[1])
    assert torch.allclose(per_head[0], 10000 ** (-2 * torch.arange(12).double() / 12), rtol=1e-6)


@pytest.mark.parametrize("axes", [2, 3])
def test_every_axis_has_a_ladder_over_its_own_features(axes: int) -> None:
    theta = frequency_ladder(config(axes=axes)).double().view(2, axes, 12 // axes)
    size = 12 // axes
    index = torch.arange(2)[:, None] * size + torch.arange(size)[None, :]
    for axis in range(axes):
        assert torch.allclose(theta[:, axis], 10000 ** (-2 * index.double() / (2 * size)), rtol=1e-6)
    literal = frequency_ladder(config(axes=axes, lrpe_frequencies="global")).flatten().double()
    assert torch.allclose(literal, 10000 ** (-2 * torch.arange(24).double() / 24), rtol=1e-6)
