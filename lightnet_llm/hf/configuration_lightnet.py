"""Configuration of the Hugging Face model: the architecture's fields under the names that training gives them."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PretrainedConfig


class ImageFields(NamedTuple):
    """Training's ``model.image``."""

    size: tuple[int, int]
    patch: int
    channels: int
    classes: int


class LightNetConfig(PretrainedConfig):
    """Fields, meanings and defaults are those of training's ``model`` section (``docs/configuration.md``).

    Transformers' usual names read and write the same values: hidden_size, num_hidden_layers, num_attention_heads,
    intermediate_size. Under its names alone: ``model.image`` as image_size, patch_size and num_channels, and the number of
    classes, of images or sentences, as num_labels, with their names in id2label.
    """

    model_type = "lightnet"
    attribute_map = {
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "glu_width",
    }
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        layers: int = 6,
        width: int = 512,
        heads: int = 8,
        glu_width: int = 1365,
        vocab_size: int = 50272,
        head: str = "causal_lm",
        mixer: str = "lightnet",
        gate_rank: int = 64,
        norm: str = "srms",
        norm_eps: float = 1e-5,
        scan_norm_eps: float | None = None,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        tie_embeddings: bool = True,
        tpe: bool = True,
        tpe_rank: int = 64,
        tpe_init_length: int = 2048,
        tpe_bidirectional: bool | None = None,
        lrpe: bool = True,
        lrpe_learnable: bool = True,
        lrpe_rate: float = 1.0,
        lrpe_base: float = 10000.0,
        lrpe_ladder: str = "across_heads",
        lrpe_frequencies: str = "per_axis",
        lrpe_gradient_scale: float = 1 / 64,
        decay: str = "shared",
        decay_rank: int = 128,
        axes: int = 1,
        causal: bool = True,
        initializer_std: float = 0.02,
        image_size: tuple[int, int] | list[int] | int | None = None,
        patch_size: int | None = None,
        num_channels: int = 3,
        use_cache: bool = True,
        **kwargs: Any,
    ):
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        kwargs["tie_word_embeddings"] = tie_embeddings
        for standard, own in self.attribute_map.items():
            given[own] = kwargs.pop(standard, given[own])
        if given["width"] % given["heads"]:
            raise ValueError(f"heads {given['heads']} must divide width {given['width']}")
        if isinstance(image_size, int):
            image_size = image_size, image_size
        given["image_size"] = None if image_size is None else list(image_size)
        if image_size is not None and patch_size is None:
            raise ValueError(f"image_size {given['image_size']} needs a patch_size")
        for name, value in given.items():
            setattr(self, name, value)
        super().__init__(**kwargs)

    conditioning = "tokens"  # of denoisers, which have no class here

    @property
    def head_width(self) -> int:
        """Features per head."""
        return self.width // self.heads

    @property
    def classes(self) -> int:
        """Of a classifier of sentences; other models have no use for it."""
        return int(self.num_labels or 0)

    @property
    def image(self) -> ImageFields | None:
        """What an image model is given; None of a language model."""
        if self.image_size is None:
            return None
        return ImageFields(tuple(self.image_size), self.patch_size, self.num_channels, self.classes)
