"""What each layer of a transformers model needs of its attention, found by running two tokens through it."""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kernels.errors import ModelFileError
from kernels.models.transformers.adapter import ATTENTION_NAME, Span, attention_forward, run

VisibleFunction = Callable[..., torch.Tensor]
"""transformers' mask function (batch, head, query position, key position): True where the query sees the key."""

FAR = 1 << 20
"""No request is longer, so a window beyond this counts as none."""

_PROBE_NAME = "tailrace_probe"
"""The name of an attention for which, unlike ours, transformers builds masks."""

_SUPPORTED = ("scaling", "softcap", "s_aux", "sliding_window", "is_causal")
_WITHOUT_EFFECT = (
    *("module", "dropout", "use_cache", "cache_position", "position_ids", "position_embeddings"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
"""Arguments that models pass but that no attention function of transformers reads in a forward pass like ours."""

_IN_WORDS = {
    "position_bias": "position biases added to attention scores",
    "attention_mask": "attention masks of its own",
    "sinks": "attention sinks that depend on the token",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}


@dataclass(frozen=True, slots=True)
class LayerNeeds:
    num_kv_heads: int
    head_dim: int
    """The size of keys or values, whichever is larger."""
    span: Span


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's call of its attention."""

    num_kv_heads: int
    head_dim: int
    mask: torch.Tensor | None


def probe_layers(folder: Path, model: PreTrainedModel) -> list[LayerNeeds]:
    """Return the needs of each layer in the order of the calls; empty for a model whose attention cannot be replaced.

    Leaves the model with our attention. Raises ModelFileError for attention that ours cannot replace.
    """
    token = _visible_functions.set([])
    try:
        with_masks = _calls(folder, model, _PROBE_NAME)
        functions = _visible_functions.get()
    finally:
        _visible_functions.reset(token)
    without_masks = _calls(folder, model, ATTENTION_NAME)
    if any(call.mask is not None for call in without_masks):
        raise _not_supported(folder, "attention_mask")
    return [
        LayerNeeds(call.num_kv_heads, call.head_dim, _span(folder, call.mask, functions))
        for call in with_masks
    ]


def _calls(folder: Path, model: PreTrainedModel, attention_name: str) -> list[_Call]:
    model.set_attn_implementation(attention_name)
    recorder = _Recorder(folder)
    if model.config._attn_implementation == attention_name:
        tokens = torch.tensor([1, 2], device=model.device)
        run(model, recorder, tokens, torch.arange(2, device=model.device), tokens[:1] - 1)
    return recorder.calls


class _Recorder:
    """An attention that computes nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.calls: list[_Call] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        self._check(query, options)
        if key.shape[:2] != value.shape[:2] or key.shape[2] != query.shape[2]:
            raise ModelFileError(
                f"{self._folder}: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} "
                "of [tokens, heads, head size] do not fit together"
            )
        mask = options["attention_mask"]
        self.calls.append(_Call(key.shape[1], max(key.shape[2], value.shape[2]), mask))
        return value.new_zeros(*query.shape[:2], value.shape[2])

    def _check(self, query: torch.Tensor, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if value is not None and name not in (*_SUPPORTED, *_WITHOUT_EFFECT, "attention_mask"):
                raise _not_supported(self._folder, name)
        module, sinks = options["module"], options.get("s_aux")
        if (getattr(module, "sinks", None) is not None) != (sinks is not None):
            raise ModelFileError(
                f"{self._folder}: not supported: attention sinks that the model does not pass to its attention function"
            )
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise _not_supported(self._folder, "sinks")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelFileError(f"{self._folder}: attention that is not causal is not supported")


def _not_supported(folder: Path, name: str) -> ModelFileError:
    return ModelFileError(f"{folder}: not supported: {_IN_WORDS.get(name, name)} ({name})")


_visible_functions: ContextVar[list[VisibleFunction]] = ContextVar("masks of the pass that this thread runs")


def _mask(*, mask_function: VisibleFunction, device: torch.device | None = None, **_: Any) -> torch.Tensor:
    """The index of the mask's function instead of a mask, in a shape that survives slices of the last dimensions."""
    functions = _visible_functions.get()
    functions.append(mask_function)
    return torch.full((1, 1, 1, 1), len(functions) - 1, device=device)


def _span(folder: Path, mask: torch.Tensor | None, functions: list[VisibleFunction]) -> Span:
    if mask is None:
        return Span()
    number = int(mask.flatten()[0])
    known = mask.numel() == 1 and not mask.dtype.is_floating_point and 0 <= number < len(functions)
    try:
        span = measure_span(functions[number]) if known else None
    except (IndexError, RuntimeError, TypeError):
        span = None  # The function is defined only for the positions of the pass that it was made for.
    if span is None:
        raise _not_supported(folder, "attention_mask")
    return span


def measure_span(visible: VisibleFunction) -> Span | None:
    """Return the span that the function describes; None if it is not causal, a causal window or causal chunks."""
    width = _width(visible, FAR)
    if width == FAR + 1:
        return Span() if _is_pattern(visible, Span()) else None
    # The token just before those that FAR sees has a window of the same width, or is the last of its chunk.
    candidates = (Span(window=width), Span(chunk=_width(visible, FAR - width)))
    return next((span for span in candidates if _is_pattern(visible, span)), None)


def _width(visible: VisibleFunction, query: int) -> int:
    return int(_seen(visible, query)[: query + 1].sum())


def _is_pattern(visible: VisibleFunction, span: Span) -> bool:
    return all(
        torch.equal(_seen(visible, query), _expected(span, query)) for query in sorted(set(_queries(span)))
    )


def _queries(span: Span) -> Iterator[int]:
    """Positions on both sides of every edge of the pattern."""
    size = span.window or span.chunk or 1
    for edge in (0, size, 2 * size, 3 * size, FAR):
        yield from (query for query in (edge - 1, edge, edge + 1) if 0 <= query <= FAR)


def _seen(visible: VisibleFunction, query: int) -> torch.Tensor:
    """[query + 4]: whether the query sees each key, up to a few after itself."""
    keys = torch.arange(query + 4)
    zero = torch.tensor(0)
    return torch.as_tensor(visible(zero, zero, torch.tensor(query), keys)).expand(len(keys))


def _expected(span: Span, query: int) -> torch.Tensor:
    keys = torch.arange(query + 4)
    seen = keys <= query
    if span.window is not None:
        seen &= keys > query - span.window
    if span.chunk is not None:
        seen &= keys // span.chunk == query // span.chunk
    return seen


AttentionInterface.register(_PROBE_NAME, attention_forward)
AttentionMaskInterface.register(_PROBE_NAME, _mask)
