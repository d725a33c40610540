"""The diffusion objective against diffusers' process and against the formulas."""

import math

import pytest
import torch
from torch import Tensor

from lightnet_llm.models.diffusion import linear


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("steps", [1000, 250])
def test_the_process_is_that_of_the_samplers(steps: int) -> None:
    """diffusers' scheduler adds the same noise, and its step has the same mean and variance for the same prediction."""
    from diffusers import DDPMScheduler

    scale = 1000.0 / steps
    scheduler = DDPMScheduler(
        steps, beta_start=1e-4 * scale, beta_end=0.02 * scale, variance_type="learned_range", clip_sample=False
    )
    process = linear(steps)
    images, noise = draw(5, 4, 3, 3), draw(5, 4, 3, 3, seed=1)
    times = torch.tensor([0, 1, steps // 3, steps - 2, steps - 1])
    noisy = process.add_noise(images, noise, times)
    torch.testing.assert_close(noisy, scheduler.add_noise(images, noise, times).double(), rtol=1e-5, atol=1e-5)
    for row, time in enumerate(times.tolist()):
        # With the true noise and the lowest variance, a step's mean is the posterior's.
        predicted = torch.cat([noise[row : row + 1], -torch.ones_like(noise[row : row + 1])], 1)
        steps_taken = [
            scheduler.step(
                predicted, time, noisy[row : row + 1], generator=torch.Generator().manual_seed(seed)
            ).prev_sample
            for seed in range(2)
        ]
        mean = process.of_start[time] * images[row] + process.of_now[time] * noisy[row]
        if time == 0:
            torch.testing.assert_close(steps_taken[0][0], mean, rtol=1e-4, atol=1e-4)
        else:
            spread = [(x[0] - mean) / (0.5 * process.low[time]).exp() for x in steps_taken]
            wanted = [
                torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(s), dtype=torch.float64)[0]
                for s in (0, 1)
            ]
            torch.testing.assert_close(spread[0] - spread[1], wanted[0] - wanted[1], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(spread[0], wanted[0], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("time", [0, 1, 10, 999])
def test_the_first_steps_have_noise_in_every_dtype(time: int, dtype: torch.dtype) -> None:
    process, ones = linear(), torch.ones(1, 1, 1, 1, dtype=dtype)
    for image, noise, wanted in ((0 * ones, ones, 1 - process.kept[time]), (ones, 0 * ones, process.kept[time])):
        found = float(process.add_noise(image, noise, torch.tensor([time])))
        assert found == pytest.approx(math.sqrt(float(wanted)), rel=torch.finfo(dtype).eps)


def normal_divergence(mean: float, log_variance: float, other: float, log_other: float) -> float:
    return 0.5 * (
        log_other - log_variance + math.exp(log_variance - log_other) + (mean - other) ** 2 * math.exp(-log_other) - 1
    )


@pytest.mark.parametrize("time", [0, 1, 400, 999])
def test_the_loss_is_its_formula(time: int) -> None:
    process = linear()
    images = (draw(1, 1, 2, 2).clamp(-1, 1) * 127.5).round() / 127.5
    images[0, 0, 0, 0], images[0, 0, 1, 1] = 1.0, -1.0
    noise, predicted = draw(1, 1, 2, 2, seed=1), draw(1, 2, 2, 2, seed=2)
    times = torch.tensor([time])
    found = float(process.loss(predicted, images, noise, times))

    beta = [1e-4 + (0.02 - 1e-4) * i / 999 for i in range(1000)]
    kept = [1.0]
    for b in beta:
        kept.append(kept[-1] * (1 - b))
    now, before = kept[time + 1], kept[time]
    posterior = beta[max(time, 1)] * (1 - kept[max(time, 1)]) / (1 - kept[max(time, 1) + 1])
    total = 0.0
    for y in range(2):
        for x in range(2):
            image, true = float(images[0, 0, y, x]), float(noise[0, 0, y, x])
            guess, share = float(predicted[0, 0, y, x]), float(predicted[0, 1, y, x])
            noisy = math.sqrt(now) * image + math.sqrt(1 - now) * true
            start = (noisy - math.sqrt(1 - now) * guess) / math.sqrt(now)
            means = [
                (beta[time] * math.sqrt(before) * s + (1 - before) * math.sqrt(1 - beta[time]) * noisy) / (1 - now)
                for s in (start, image)
            ]
            low, high = math.log(posterior), math.log(beta[time])
            log_variance = low + (share + 1) / 2 * (high - low)
            if time:
                bound = normal_divergence(means[1], low, means[0], log_variance)
            else:
                deviation = math.exp(0.5 * log_variance)

                def below(edge: float, mean: float = means[0], deviation: float = deviation) -> float:
                    return 0.5 * (1 + math.erf((edge - mean) / deviation / math.sqrt(2)))

                upper = 1.0 if image > 0.999 else below(image + 1 / 255)
                lower = 0.0 if image < -0.999 else below(image - 1 / 255)
                bound = -math.log(max(upper - lower, 1e-12))
            total += (guess - true) ** 2 / 4 + bound / math.log(2) / 4
    assert found == pytest.approx(total, rel=2e-4)


def test_the_bound_trains_the_variance_alone_and_is_least_at_the_true_one() -> None:
    process, times = linear(), torch.full((3,), 2)
    images, noise = draw(3, 2, 4, 4), draw(3, 2, 4, 4, seed=1)
    share = torch.zeros(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    guess = (noise + 0.1).requires_grad_()
    process.loss(torch.cat([guess, share], 1), images, noise, times).sum().backward()
    assert guess.grad is not None and share.grad is not None
    torch.testing.assert_close(guess.grad, 2 * (guess - noise).detach() / 32, rtol=1e-4, atol=1e-6)
    assert share.grad.abs().min() > 0
    losses = [
        float(process.loss(torch.cat([noise, torch.full_like(noise, at)], 1), images, noise, times).sum())
        for at in (-1.0, -0.5, 1.0)
    ]
    assert losses[0] < losses[1] < losses[2] and losses[0] == pytest.approx(0.0, abs=1e-4)


def test_velocity_is_noise_by_another_name() -> None:
    """By its definition, as diffusers has it; a model of either that knows all has the same loss, another one not."""
    from diffusers import DDPMScheduler

    process, times = linear(), torch.tensor([0, 3, 400, 998, 999])
    images, noise, guess = draw(5, 2, 3, 3).clamp(-1, 1), draw(5, 2, 3, 3, seed=1), draw(5, 4, 3, 3, seed=2)
    velocity, noisy = process.velocity(images, noise, times), process.add_noise(images, noise, times)
    wanted = DDPMScheduler(1000, beta_start=1e-4, beta_end=0.02).get_velocity(images, noise, times)
    torch.testing.assert_close(velocity, wanted.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(process.noise_of(velocity, noisy, times), noise)
    share = guess[:, 2:]
    by_noise = process.loss(torch.cat([noise, share], 1).double(), images, noise, times)
    by_velocity = process.loss(torch.cat([velocity, share], 1), images, noise, times, "velocity")
    torch.testing.assert_close(by_velocity, by_noise, rtol=1e-3, atol=1e-4)
    off = guess[:, :2].float()
    error = (off - velocity).square().flatten(1).mean(1)
    as_noise = process.noise_of(off, noisy.float(), times)
    bound = process.loss(torch.cat([as_noise, share.float()], 1), images, noise, times) - (
        (as_noise - noise).square().flatten(1).mean(1)
    )
    found = process.loss(torch.cat([off, share.float()], 1), images, noise, times, "velocity")
    torch.testing.assert_close(found.double(), (error + bound).double(), rtol=1e-3, atol=1e-3)
