"""What a masked language model hides of its samples (model-spec 7; paper section 5)."""

from pydantic import Field, model_validator

from .base import Section


class MaskingConfig(Section):
    """Of ``head: masked_lm`` alone. Which tokens are hidden is drawn anew in every epoch, from the seed and the sample."""

    share: float = Field(default=0.25, gt=0, le=1, description="Share of a sample's ordinary tokens that are hidden.")
    masked: float = Field(default=0.8, ge=0, le=1, description="Share of the hidden ones that become the mask token.")
    drawn: float = Field(default=0.1, ge=0, le=1, description="Share of the hidden ones that become another token.")
    token: str | None = Field(
        default=None,
        description="The mask token's spelling in the tokenizer; null: its [MASK] or <mask>, else the first id after its own.",
    )

    @model_validator(mode="after")
    def _shares(self) -> "MaskingConfig":
        if self.masked + self.drawn > 1.0:
            raise ValueError(f"masked {self.masked} and drawn {self.drawn} are more than 1 together")
        return self
