"""LightNet under Hugging Face's interface. The mathematics is training's own (``models/``), with plain torch layers.

Here are the bare model and the language model; ``heads_lightnet`` has the others.

An exported folder holds this file and what it imports, so that it loads without this package (``hf.bundle``).
"""

from __future__ import annotations

import inspect
from dataclasses import make_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.utils import ModelOutput

from ..models.backbone import Backbone
from ..models.causal_lm import CausalLM
from ..models.classifier import ImageClassifier
from ..models.context import ForwardContext, ModelState
from ..models.decoding import can_decode
from ..models.dropout import DropoutKey
from ..models.layers import PlainLayers
from ..models.parameters import spec_of
from .cache_lightnet import LightNetCache
from .configuration_lightnet import LightNetConfig

# Transformers 5.24 gave the cache's argument a new name.
_GENERATION = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _GENERATION else "past_key_values"


# What the models return: loss, scalar, nats per label, with labels; logits [B, N or fewer, vocabulary], 0 at padding, None
# in training with labels, where they are never held; last_hidden_state [B, N, width] after the final norm
# (``LightNetModel``); and the state after the last token, under the name that this version of Transformers uses.
LightNetOutput = make_dataclass(
    "LightNetOutput",
    [(name, Any, None) for name in ("loss", "logits", "last_hidden_state", CACHE)],
    bases=(ModelOutput,),
)
LightNetOutput.__module__ = __name__


class LightNetPreTrainedModel(PreTrainedModel):
    """What all classes share: the weights, and reading tokens with padding, segments and a cache."""

    config_class = LightNetConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _keep_in_fp32_modules_strict = ["theta", "tpe.raw", "tpe.beta"]
    _is_stateful = True
    _head: str | None = None  # training's name of the class's head

    def __init__(self, config: LightNetConfig):
        config.head = self._head or config.head  # what is saved says what it is, also where it began as another head's
        super().__init__(config)
        self.model = self._build(config)
        self._specs = {name: spec_of(parameter) for name, parameter in self.model.named_parameters()}
        self.gradient_checkpointing = False
        self.post_init()

    def _build(self, config: LightNetConfig) -> Backbone:
        """Training's model, without values."""
        return CausalLM(config, PlainLayers(vocab_multiple=1))

    def get_input_embeddings(self) -> nn.Module:
        """[vocabulary, width]; the head's, too, where weights are tied. Of an image model the patches'."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace it."""
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The head, None where the input embedding serves, or where the head is no language model's."""
        return self.model.head if isinstance(self.model, CausalLM) else None

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace it."""
        self.model.head = value

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Training's own initial values, drawn from torch's current random state."""
        if not hasattr(self, "_names"):
            self._names = {child: name for name, child in self.model.named_modules()}
        for name, parameter in module.named_parameters(recurse=False):
            spec = self._specs.get(f"{self._names.get(module, '?')}.{name}".removeprefix("."))
            if spec is None or parameter.is_meta or getattr(parameter, "_is_hf_initialized", False):
                continue
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
            values = spec.init(generator, spec.shape)
            if values.shape == parameter.shape:
                parameter.copy_(values)

    def _set_gradient_checkpointing(self, enable: bool = True, every_n_layers: int = 1, **_: Any) -> None:
        self.gradient_checkpointing = enable
        for index, block in enumerate(self.model.layers):
            block.recompute = enable and index % every_n_layers == 0

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: LightNetCache | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, LightNetCache | None]:
        """Activations before the final norm: [B, N, width], or with padding [1, real tokens, width] and their mask."""
        if input_ids is None or input_ids.ndim != 2:
            raise ValueError("LightNet: give input_ids [B, N]; embeddings in their place are not supported")
        if input_ids.numel() == 0:
            raise ValueError(f"LightNet: input_ids is empty, {list(input_ids.shape)}; give at least one token a row")
        if cache is not None and not isinstance(cache, LightNetCache):
            raise ValueError(f"LightNet: the cache is a {type(cache).__name__}; give a LightNetCache, or none")
        tokens = input_ids.shape[1]
        mask = None if attention_mask is None else attention_mask[:, -tokens:].bool()
        if mask is not None and bool(mask.all()):
            mask = None
        if cache is not None and not self.config.causal:
            raise ValueError("LightNet: a model that is not causal has no cache; give none")
        if use_cache and cache is None:
            cache = LightNetCache()
        keep = cache is not None and use_cache
        if keep and cache is not None and cache.state is not None and tokens == 1 and mask is None and self._decodes():
            hidden, _ = self.model.hidden(input_ids, ForwardContext(decode=True), cache.for_decode(self.model))
            cache.positions += 1
            return hidden, None, cache
        bounds, ids = cu_seqlens, input_ids
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("LightNet: give attention_mask or cu_seqlens, not both; packed rows hold no padding")
            # Rows without their padding, one after the other: padding never enters a scan.
            ids, bounds = input_ids[mask][None], nn.functional.pad(mask.sum(1).cpu().cumsum(0), (1, 0))
            if ids.numel() == 0:
                raise ValueError("LightNet: attention_mask leaves no token; give at least one")
        if bounds is not None and self.training and self.config.drop_path:
            raise ValueError("LightNet: drop_path leaves out whole rows, and these are packed; train without padding")
        context = ForwardContext(cu_seqlens=bounds, dropout=self._key(ids.shape[0], ids.shape[1], ids.device))
        state = cache.for_scan() if cache is not None else None
        hidden, after = self.model.hidden(ids, context, state, keep)
        if cache is not None and keep:
            assert isinstance(after, ModelState)
            cache.set(after)
            cache.positions += tokens
        return hidden, mask, cache if keep else None

    def _pixels(self, pixel_values: Tensor | None) -> tuple[Tensor, ForwardContext]:
        """Images [B, C, H, W] as training's classifier takes them, and their context."""
        if pixel_values is None or pixel_values.ndim != 4:
            raise ValueError("LightNet: give pixel_values [B, C, H, W], as the folder's image processor makes them")
        high, wide = self.model.embedding.grid(pixel_values)
        return pixel_values, ForwardContext(dropout=self._key(len(pixel_values), high * wide, pixel_values.device))

    def _decodes(self) -> bool:
        return can_decode(self.model) and not torch.is_grad_enabled() and not self.training

    def _key(self, rows: int, tokens: int, device: torch.device) -> DropoutKey | None:
        if not self.training or not (self.config.dropout or self.config.drop_path):
            return None
        draw = int(torch.randint(2**31, ()))
        return DropoutKey(draw, 0, torch.arange(rows, device=device), tokens)

    def _caches(self, use_cache: bool | None) -> bool:
        default = self.config.use_cache and not self.training
        wanted = bool(default if use_cache is None else use_cache)
        return wanted and self.config.mixer == "lightnet" and self.config.causal


class LightNetModel(LightNetPreTrainedModel):
    """The model without its head, of texts or, where the configuration has an image_size, of images."""

    def _build(self, config: LightNetConfig) -> Backbone:
        return super()._build(config) if config.image is None else ImageClassifier(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: LightNetCache | None = None,
        past_key_values: LightNetCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        """Arguments as in ``LightNetForCausalLM.forward``, or pixel_values [B, C, H, W]; returns last_hidden_state
        [B, N, width]."""
        if self.config.image is not None:
            images, context = self._pixels(pixel_values)
            tokens = self.model.image_tokens(self.model.embedding(images), self.model.embedding.grid(images), context)
            output = LightNetOutput(last_hidden_state=tokens)
            return output.to_tuple() if return_dict is False else output
        given = cache if cache is not None else past_key_values
        hidden, mask, after = self._read(input_ids, attention_mask, given, self._caches(use_cache), cu_seqlens)
        assert input_ids is not None
        normed = self.model.norm(unpacked(hidden, mask))
        output = LightNetOutput(last_hidden_state=normed.view(*input_ids.shape, -1), **{CACHE: after})
        return output.to_tuple() if return_dict is False else output


class LightNetForCausalLM(LightNetPreTrainedModel, GenerationMixin):
    """The language model."""

    _head = "causal_lm"

    def __init__(self, config: LightNetConfig):
        if not config.causal or config.image is not None:
            raise ValueError(
                "LightNetForCausalLM: the configuration is not a causal language model's; use another class"
            )
        super().__init__(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: LightNetCache | None = None,
        past_key_values: LightNetCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        """Next-token logits, and with labels their loss.

        Args:
            input_ids: integer [B, N].
            attention_mask: [B, N], or [B, read before + N]: 0 at padding, on either side, which then does not exist.
            cache, past_key_values: what was read before; one of them.
            labels: [B, N] like input_ids (they are shifted here); negative ones do not count.
            use_cache: return the state after the last token; default: as configured, and not in training.
            logits_to_keep: 0 all; n the last n positions; or int64 positions.
            cu_seqlens: int [segments + 1], documents packed into one row, which do not see each other (B = 1).
            num_items_in_batch: the loss is divided by it in place of the number of labels.
        """
        given = cache if cache is not None else past_key_values
        caches = self._caches(use_cache) and labels is None
        hidden, mask, after = self._read(input_ids, attention_mask, given, caches, cu_seqlens)
        assert input_ids is not None
        loss = None if labels is None else self._loss(hidden, labels, mask, num_items_in_batch)
        logits = None
        if loss is None or not self.training:
            rows = unpacked(hidden, mask).view(*input_ids.shape, -1)
            rows = rows[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else rows[:, logits_to_keep]
            logits = self.model.logits(rows)
        output = LightNetOutput(loss=loss, logits=logits, **{CACHE: after})
        return output.to_tuple() if return_dict is False else output

    def _loss(self, hidden: Tensor, labels: Tensor, mask: Tensor | None, items: Tensor | int | None) -> Tensor:
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        shifted = shifted if mask is None else shifted[mask]
        return mean_loss(self.model, hidden, shifted, items)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # keys and values are not kept


def mean_loss(model: CausalLM, hidden: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
    """Nats per label of activations before the final norm; labels of as many places, those below 0 do not count."""
    total = model.nll(hidden, labels.to(hidden.device).reshape(hidden.shape[:-1]), "sum")
    return total / counted((labels >= 0).sum(), items, total.device)


def counted(count: Tensor, items: Tensor | int | None, device: torch.device) -> Tensor | int:
    """What a sum of losses is divided by: the labels that count, or what the caller says instead."""
    if items is None:
        return count.clamp_min(1).to(device)
    return items.to(device) if isinstance(items, Tensor) else items


def unpacked(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """[1, real tokens, width] back to [B, N, width], 0 at padding."""
    if mask is None:
        return hidden
    rows = hidden.new_zeros(*mask.shape, hidden.shape[-1])
    return rows.masked_scatter(mask[..., None], hidden)
