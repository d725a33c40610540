"""The Inception net of 2015 from a file of weights, against what pytorch-fid's and torch-fidelity's code gave for the same."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from lightnet_eval.features import open_net
from lightnet_eval.inception import Inception, inception_of, resize
from torch import Tensor

from lightnet_llm.cli import main
from lightnet_llm.errors import UserError

from .test_features import runs  # noqa: F401


def weights() -> dict[str, Tensor]:
    """Drawn weights by the published files' names, every one of which matters."""
    random, found = np.random.default_rng(0), {}
    for name, value in Inception().state_dict().items():
        drawn = random.standard_normal(value.shape, np.float32)
        if name.endswith("conv.weight"):
            drawn *= np.float32((2 / np.prod(value.shape[1:])) ** 0.5)
        elif name.endswith(("running_var", "bn.weight")):
            drawn = np.float32(0.5) + random.random(value.shape, np.float32)
        else:
            drawn *= np.float32(0.02)
        if not name.endswith("num_batches_tracked"):  # as in the published files
            found[name] = torch.from_numpy(drawn)
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(weights(), path)
    return path


WANTED = [
    4.29102,
    4.30599,
    1.39243,
    28.3508,
    1.55787,
    0.0,
    0.951195,
    0.949026,
    2.74208,
    0.0,
    0.0,
    0.698203,
    -17.193,
    -12.0405,
    -14.9792,
    -24.4973,
]


def photos(count: int = 2) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 40, 52, 3), dtype=np.uint8)


def test_it_is_the_net_of_2015(file: Path) -> None:
    """WANTED: by pytorch-fid 0.3.0's net, input resized and normed as torch-fidelity 0.4.0 does, torch 2.13.0 on a CPU."""
    assert sum(x.numel() for x in Inception().parameters()) == 23_850_960
    net = open_net(file, "cpu")
    seen = net.see(photos())
    assert net.inception and net.name == "weights.pth" and seen.spatial is not None and seen.probabilities is not None
    assert seen.features.shape == (2, 2048) and seen.spatial.shape == (2, 7 * 17 * 17)
    found = [*seen.features.mean(1), *seen.features[1, [0, 700, 1500, 2047]]]
    found += [*seen.spatial.mean(1), *seen.spatial[0, [0, 289, 1000, 2022]], *seen.probabilities.log()[0, :4]]
    torch.testing.assert_close(torch.stack(found), torch.tensor(WANTED), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (20, 31)])
def test_pixels_are_between_those_left_and_above(size: tuple[int, int]) -> None:
    side, images = 12, torch.from_numpy(np.random.default_rng(2).random((1, 2, *size), np.float32))
    found = resize(images, side)
    for row in range(side):
        for column in range(side):
            y, x = row * size[0] / side, column * size[1] / side
            up, left = int(y + 1e-6), int(x + 1e-6)
            down, right = min(up + 1, size[0] - 1), min(left + 1, size[1] - 1)
            over = images[..., up, left] + (images[..., up, right] - images[..., up, left]) * (x - left)
            under = images[..., down, left] + (images[..., down, right] - images[..., down, left]) * (x - left)
            torch.testing.assert_close(found[..., row, column], over + (under - over) * (y - up))


def test_other_weights_are_refused(file: Path, tmp_path: Path) -> None:
    given, path = torch.load(file, weights_only=True), tmp_path / "other.pth"
    auxiliary = {**given, "AuxLogits.fc.weight": torch.zeros(1000, 768)}
    assert inception_of(auxiliary).fc.bias.equal(given["fc.bias"])  # of training alone
    for wrong, words in (
        ({**given, "fc.weight": torch.zeros(1000, 2048)}, "has fc.weight of [1000, 2048], wanted is [1008, 2048]"),
        ({name: x for name, x in given.items() if name != "fc.bias"}, "has no fc.bias"),
        ({**given, "fc.more": torch.zeros(1)}, "has fc.more, too"),
        ({"state": 3}, "is no mapping of names to tensors"),
        (torch.zeros(3), "is no mapping of names to tensors"),
    ):
        torch.save(wrong, path)
        with pytest.raises(UserError) as error:
            open_net(path, "cpu")
        assert words in str(error.value) and "Inception net of 2015" in str(error.value)
    path.write_text("text")
    with pytest.raises(UserError, match="neither TorchScript nor tensors"):
        open_net(path, "cpu")


@pytest.mark.slow
def test_the_command_has_all_figures(file: Path, runs: tuple[Path, Path, str], tmp_path: Path) -> None:  # noqa: F811
    command = ["sample", str(runs[1]), "--sampler", "ddim", "--steps", "2", "--per-class", "2", "--device", "cpu"]
    command += ["--output", str(tmp_path / "x.png"), "--reference", runs[2], "--figures", str(tmp_path / "x.json")]
    result = CliRunner().invoke(main, [*command, "--features", str(file)])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "x.json").read_text())["figures"]
    assert figures["fid"] > 0 and figures["sfid"] > 0 and figures["inception_score"] >= 1.0
    assert figures["images"] == 6 and figures["reference_images"] == 12 and "fid" in result.stdout
