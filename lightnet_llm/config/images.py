"""What image models are given in training: augmentation and mixing (classifier), noise and dropped classes (denoiser)."""

from typing import Literal

from pydantic import Field, model_validator

from .base import Section


class AugmentationConfig(Section):
    """Of ``head: classifier``; crop and flip also of a denoiser (of latents: flip). Drawn by seed, epoch and sample."""

    crop_scale: tuple[float, float] | None = Field(
        default=(0.08, 1.0),
        description="Share of an image's area that a random crop takes; null: the middle of the image.",
    )
    crop_ratio: tuple[float, float] = Field(default=(3 / 4, 4 / 3), description="Width / height of a random crop.")
    center_share: float = Field(
        default=0.875, gt=0, le=1, description="Of the shorter side, how much a middle crop (validation) keeps."
    )
    flip: float = Field(default=0.5, ge=0, le=1, description="Chance that an image is mirrored.")
    randaugment: float = Field(
        default=0.0, ge=0, le=10, description="Magnitude of RandAugment's two operations; 0: none."
    )
    erasing: float = Field(default=0.0, ge=0, le=1, description="Chance that a box of the image becomes noise.")
    mixup: float = Field(default=0.0, ge=0, le=1, description="Alpha of mixup's Beta distribution; 0: no mixup.")
    cutmix: float = Field(default=0.0, ge=0, le=1, description="Alpha of CutMix's Beta distribution; 0: no CutMix.")
    mix_chance: float = Field(default=1.0, ge=0, le=1, description="Chance that a sample is mixed with another one.")
    cutmix_share: float = Field(default=0.5, ge=0, le=1, description="Share of CutMix where both are on.")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Share of a label spread over all classes.")
    mean: tuple[float, ...] = Field(
        default=(0.485, 0.456, 0.406), description="Subtracted from pixels in [0, 1], one a channel (or one for all)."
    )
    std: tuple[float, ...] = Field(default=(0.229, 0.224, 0.225), description="Then they are divided by this.")

    @model_validator(mode="after")
    def _ranges(self) -> "AugmentationConfig":
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name) or (1.0, 1.0)
            if not 0 < low <= high or (name == "crop_scale" and high > 1):
                raise ValueError(
                    f"{name} [{low}, {high}] must ascend from above 0" + " to at most 1" * (name == "crop_scale")
                )
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std {list(self.std)} must be above 0")
        return self

    def of_classifiers(self) -> list[str]:
        """Names of the fields set to what a denoiser cannot use: all but crops and flips."""
        shared = ("crop_scale", "crop_ratio", "center_share", "flip")
        fields = ((name, field) for name, field in type(self).model_fields.items() if name not in shared)
        return [name for name, field in fields if getattr(self, name) != field.default]


class DiffusionConfig(Section):
    """Of ``head: denoiser``. Noise, time steps and dropped classes are drawn anew in every epoch, by seed and sample."""

    prediction: Literal["noise", "velocity"] = Field(
        default="noise",
        description="What the model predicts: the noise (DDPM, DiT), or the velocity (Salimans and Ho 2022), from which small "
        "models learn far sooner, as at late steps the noise is almost their input and has to be hit to a thousandth.",
    )
    class_drop: float = Field(
        default=0.1, ge=0, lt=1, description='Chance that a sample\'s class becomes "none": makes guidance possible.'
    )
    vae: str | None = Field(
        default=None,
        description="Folder of diffusers' AutoencoderKL that encodes the images of `data.path` while training; null: pixels as "
        "they are, or latents encoded before (`lightnet data latents`), which costs less where images are seen often.",
    )
