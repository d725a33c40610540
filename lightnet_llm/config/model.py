"""The architecture: everything that decides shapes and mathematics (paper section 4, tables 9 to 12)."""

from typing import Literal

from pydantic import Field, model_validator

from .base import Section


class ImageConfig(Section):
    """What an image model is given: pixels, or latents of a VAE."""

    size: tuple[int, int] = Field(description="Height and width in training, in pixels (latents: in latent pixels).")
    patch: int = Field(gt=0, description="Side of a square patch; each becomes one token.")
    channels: int = Field(default=3, gt=0, description="Channels of the input.")
    classes: int = Field(gt=0, description="Classes that can occur.")

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens along height and width."""
        return self.size[0] // self.patch, self.size[1] // self.patch

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.grid[0] * self.grid[1]

    @model_validator(mode="after")
    def _patches(self) -> "ImageConfig":
        if any(side < self.patch or side % self.patch for side in self.size):
            near = [max(1, round(side / self.patch)) * self.patch for side in self.size]
            raise ValueError(f"size {list(self.size)} is not made of whole patches of {self.patch}; nearest: {near}")
        return self


class ModelConfig(Section):
    """A LightNet model. Parameter counts of the presets follow from these fields alone."""

    head: Literal["causal_lm", "masked_lm", "sequence_classifier", "classifier", "denoiser"] = Field(
        default="causal_lm",
        description="What the blocks carry: a language model, a classifier of sentences, an image classifier, a diffusion "
        "denoiser.",
    )
    layers: int = Field(gt=0, description="Number of LightNet blocks.")
    width: int = Field(gt=0, description="Width d of the residual stream.")
    heads: int = Field(gt=0, description="Heads of the attention; the head width is width / heads.")
    glu_width: int = Field(gt=0, description="Inner width of the gated linear unit.")
    vocab_size: int = Field(
        default=0,
        ge=0,
        description="Tokens that can occur, before padding to a multiple of 128 x TP; language models need it.",
    )
    classes: int | None = Field(
        default=None, gt=0, description="Classes of a sequence classifier; 1: a regression, whose output is the value."
    )
    image: ImageConfig | None = Field(default=None, description="Input of a classifier or denoiser.")
    conditioning: Literal["tokens", "adaln_single"] = Field(
        default="tokens",
        description="How a denoiser is told time step and class: as two tokens before the patches, or by shifts, scales and "
        "gates of every block, of one projection and a table each.",
    )
    mixer: Literal["lightnet", "softmax"] = Field(
        default="lightnet",
        description="softmax: ordinary attention in the same block, as a peer in comparisons; needs lrpe: false.",
    )
    gate_rank: int = Field(default=64, gt=0, description="Rank of the low-rank output gate.")
    norm: Literal["srms", "rms", "layer"] = Field(
        default="srms", description="srms: RMS without weight; rms: RMS with weight; layer: LayerNorm."
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Epsilon of every norm.")
    scan_norm_eps: float | None = Field(
        default=None,
        gt=0,
        description="Epsilon of the norm behind the scan; null: norm_eps. It divides by outputs that are close to 0 at some "
        "tokens, which magnifies bf16's rounding: at 1e-2 gradients are some ten times as exact.",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout after embedding with TPE, attention output and GLU output."
    )
    drop_path: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Chance that the last block's two branches are left out of a sample; blocks before it "
        "fall linearly to 0.",
    )
    tie_embeddings: bool = Field(default=True, description="Whether the head reuses the input embedding.")
    tpe: bool = Field(default=True, description="Toeplitz positional encoding after the embedding (MD-TPE).")
    tpe_rank: int = Field(default=64, gt=0, description="Exponentials e per channel and axis in TPE.")
    tpe_init_length: int = Field(
        default=2048, gt=1, description="Longest initial time constant of TPE in tokens; the usual length of an axis."
    )
    tpe_bidirectional: bool | None = Field(
        default=None, description="Mirrored sum in TPE; null means: as the model (causal models never look ahead)."
    )
    lrpe: bool = Field(default=True, description="Linearised relative positional encoding in the scan (MD-LRPE).")
    lrpe_learnable: bool = Field(default=True, description="Whether theta is trained.")
    lrpe_rate: float = Field(
        default=1.0,
        gt=0,
        description="Factor on theta's learning rate; a step moves a phase by the rate times the lag, so less helps far lags.",
    )
    lrpe_base: float = Field(default=10000.0, gt=1, description="Base of the frequency ladder.")
    lrpe_ladder: Literal["across_heads", "per_head"] = Field(
        default="across_heads", description="One frequency ladder over all heads, or one restarted in every head."
    )
    lrpe_frequencies: Literal["per_axis", "global"] = Field(
        default="per_axis", description="A ladder of its own per axis, or the paper's literal single ladder."
    )
    lrpe_gradient_scale: float = Field(
        default=1 / 64, gt=0, le=1, description="Constant on theta's gradient, so that it does not set the clip norm."
    )
    decay: Literal["shared", "independent"] = Field(
        default="shared", description="shared: the key is its own log mass; independent: the 'no share' ablation."
    )
    decay_rank: int = Field(default=128, gt=0, description="Rank of the forget projection of decay: independent.")
    axes: int = Field(default=1, ge=1, le=3, description="Position axes: 1 for text, 2 for images, 3 for video.")
    causal: bool = Field(default=True, description="Causal scan, or the bidirectional one-scan form.")
    initializer_std: float = Field(default=0.02, gt=0, description="Standard deviation of weight initialisation.")

    @property
    def head_width(self) -> int:
        """Features per head (query, key and value alike)."""
        return self.width // self.heads

    @property
    def prefix(self) -> int:
        """Tokens before those of an image: a denoiser's time step and class."""
        return 2 if self.head == "denoiser" and self.conditioning == "tokens" else 0

    @property
    def ties_head(self) -> bool:
        """Whether the head's weight is the embedding's."""
        return self.tie_embeddings and self.head in ("causal_lm", "masked_lm")

    @model_validator(mode="after")
    def _cross_checks(self) -> "ModelConfig":
        language = self.head in ("causal_lm", "masked_lm", "sequence_classifier")
        if language != (self.image is None):
            raise ValueError(f"image is {'not for' if language else 'missing, and needed by'} head: {self.head}")
        if language != (self.vocab_size > 0):
            raise ValueError(f"vocab_size is {'missing, and needed by' if language else 'not for'} head: {self.head}")
        if (self.head == "sequence_classifier") != (self.classes is not None):
            found = "missing, and needed by" if self.classes is None else "not for"
            raise ValueError(f"classes is {found} head: {self.head}")
        if self.conditioning != "tokens" and self.head != "denoiser":
            raise ValueError(
                f"conditioning: {self.conditioning} is of head: denoiser, not of {self.head}; leave it out"
            )
        if self.causal and self.head != "causal_lm":
            raise ValueError(f"head: {self.head} needs causal: false")
        if not language and self.axes != 2:
            raise ValueError(f"head: {self.head} has two axes, height and width; set axes: 2")
        if self.mixer == "softmax" and (self.lrpe or self.decay == "independent"):
            raise ValueError("mixer: softmax has neither LRPE nor a decay; set lrpe: false and decay: shared")
        if self.width % self.heads:
            fits = [h for h in range(1, self.width + 1) if self.width % h == 0]
            near = min(fits, key=lambda h: abs(h - self.heads))
            raise ValueError(f"heads {self.heads} must divide width {self.width}; the nearest that does is {near}")
        if self.head_width > 128:
            need = -(-self.width // 128)
            near = next(h for h in range(need, self.width + 1) if self.width % h == 0)
            raise ValueError(f"head width {self.head_width} (width / heads) is above 128; use heads: {near}")
        if self.lrpe and self.head_width % self.axes:
            raise ValueError(f"head width {self.head_width} must be divisible by axes {self.axes} when lrpe is on")
        if self.causal and self.axes > 1:
            raise ValueError("a causal model has one axis; set causal: false for images or video")
        if self.causal and self.tpe_bidirectional:
            raise ValueError("tpe_bidirectional would let a causal model see later tokens; leave it null or false")
        return self
