"""Training objective of denoising diffusion with a learned variance (DDPM; Nichol and Dhariwal 2021, as DiT uses it).

The process is q(x_t | x_0) = N(sqrt(a_t) x_0, 1 - a_t), a_t the product of 1 - beta. A model predicts the noise (or the
velocity, which is a combination of it and the model's input), and where between the two bounds of the posterior's log variance
its own lies. Samplers come from diffusers, for the same process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS, FIRST, LAST = 1000, 1e-4, 0.02  # of the linear schedule (model-spec 7)


@dataclass(frozen=True)
class Process:
    """Constants of the forward process, each float64 [steps]; see :func:`linear`.

    Attributes:
        beta: variance that a step adds.
        kept: a_t, what is left of the image's variance after step t.
        low: log of the posterior's variance, the lower bound of a model's (its first entry is the second one's, as it would
            be minus infinity).
        of_start, of_now: the posterior's mean is of_start x_0 + of_now x_t.
    """

    beta: Tensor
    kept: Tensor
    low: Tensor
    of_start: Tensor
    of_now: Tensor

    @property
    def steps(self) -> int:
        """Time steps."""
        return self.beta.numel()

    def add_noise(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t for images x_0 [B, C, H, W], noise alike and timesteps int [B]."""
        image_part, noise_part = (
            _at(self.kept.sqrt(), timesteps, images),
            _at((1.0 - self.kept).sqrt(), timesteps, images),
        )
        return image_part * images + noise_part * noise

    def velocity(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """sqrt(a_t) noise - sqrt(1 - a_t) x_0 (Salimans and Ho 2022, appendix D); arguments as of :meth:`add_noise`."""
        noise_part, image_part = (
            _at(self.kept.sqrt(), timesteps, images),
            _at((1.0 - self.kept).sqrt(), timesteps, images),
        )
        return noise_part * noise - image_part * images

    def noise_of(self, velocity: Tensor, noisy: Tensor, timesteps: Tensor) -> Tensor:
        """The noise in x_t, given its velocity: sqrt(a_t) v + sqrt(1 - a_t) x_t."""
        own, given = _at(self.kept.sqrt(), timesteps, noisy), _at((1.0 - self.kept).sqrt(), timesteps, noisy)
        return own * velocity + given * noisy

    def loss(
        self, predicted: Tensor, images: Tensor, noise: Tensor, timesteps: Tensor, prediction: str = "noise"
    ) -> Tensor:
        """Mean squared error of the noise (or velocity) plus the variational bound of the variance, per sample, float32 [B].

        The bound is in bits per dimension, weighed by steps / 1000, and its mean takes no gradient, so that it trains the
        variance alone.

        Args:
            predicted: [B, 2 C, H, W], of a model on ``add_noise`` of the others.
            prediction: "noise" or "velocity", what its first half is.
        """
        guess, share = predicted.float().chunk(2, 1)
        images, noise = images.float(), noise.float()
        noisy, target = self.add_noise(images, noise, timesteps), noise
        if prediction == "velocity":
            target = self.velocity(images, noise, timesteps)
        error = (guess - target).square().flatten(1).mean(1)
        guess = guess.detach() if prediction == "noise" else self.noise_of(guess.detach(), noisy, timesteps)
        bound = self._bound(guess, share, images, noisy, timesteps)
        return error + bound * (self.steps / 1000.0)

    def _bound(self, guess: Tensor, share: Tensor, images: Tensor, noisy: Tensor, timesteps: Tensor) -> Tensor:
        low, high = _at(self.low, timesteps, noisy), _at(self.beta.log(), timesteps, noisy)
        noise_part, image_part = (
            _at((1.0 - self.kept).sqrt(), timesteps, noisy),
            _at(self.kept.sqrt(), timesteps, noisy),
        )
        start = (noisy - noise_part * guess) / image_part
        weights = _at(self.of_start, timesteps, noisy), _at(self.of_now, timesteps, noisy)
        mean, true_mean = weights[0] * start + weights[1] * noisy, weights[0] * images + weights[1] * noisy
        log_variance = low + (share + 1.0) / 2.0 * (high - low)
        divergence = 0.5 * (
            log_variance - low + (low - log_variance).exp() + (true_mean - mean).square() * (-log_variance).exp() - 1.0
        )
        first = (timesteps == 0).view(-1, 1, 1, 1)
        terms = torch.where(first, -_log_likelihood(images, mean, 0.5 * log_variance), divergence)
        return terms.flatten(1).mean(1) / math.log(2.0)


def linear(steps: int = STEPS, device: torch.device | str = "cpu") -> Process:
    """The process whose beta grows linearly from 1e-4 to 0.02 over 1000 steps (as fast over fewer)."""
    scale = 1000.0 / steps
    beta = torch.linspace(FIRST * scale, LAST * scale, steps, dtype=torch.float64, device=device)
    kept = (1.0 - beta).cumprod(0)
    before = torch.cat([kept.new_ones(1), kept[:-1]])
    variance = beta * (1.0 - before) / (1.0 - kept)
    low = torch.cat([variance[1:2], variance[1:]]).log()
    of_start = beta * before.sqrt() / (1.0 - kept)
    of_now = (1.0 - before) * (1.0 - beta).sqrt() / (1.0 - kept)
    return Process(beta, kept, low, of_start, of_now)


def _at(values: Tensor, timesteps: Tensor, like: Tensor) -> Tensor:
    """Entries of a float64 table, rounded last: 1 - kept is 0 in bf16 at early steps."""
    return values[timesteps].to(like.dtype).view(-1, 1, 1, 1)


def _log_likelihood(images: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """Log probability of images made of steps of 1/127.5 in [-1, 1] under a Gaussian, cut into as many bins."""
    centred, inverse = images - mean, (-log_deviation).exp()
    half = 1.0 / 255.0
    above, below = _cumulative(inverse * (centred + half)), _cumulative(inverse * (centred - half))
    edge = torch.where(images > 0.999, 1.0 - below, above - below)
    return torch.where(images < -0.999, above, edge).clamp(min=1e-12).log()


def _cumulative(x: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
