"""The target model: one ragged batch of requests verified in one forward pass.

`Target` is what the generation loop needs of a model; `HFTarget` provides it for any Hugging Face causal LM whose
layers are full attention, Kimi Delta Attention or Gated DeltaNet. Rows of a batch may have different lengths: each
request's keys and values stand at their absolute positions in a `RaggedKV`, and a mask says what each row sees.
`verify` writes rows behind the committed ones; only `commit` moves the committed length, so a rejected draft is undone
by not committing it. Recurrent state, which has no rows, is undone by `dspark.rollback`.

Taps are read by hooks on the decoder layers and index Hugging Face `hidden_states`: 0 = what the first layer
receives, k = raw output of layer k-1.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import CacheLayerMixin

from dspark.backbone import ATTENTION_BACKENDS, additive
from dspark.cache import Place, RaggedKV
from dspark.recurrent import RECURRENT_TYPES, ReplayLayer, attach
from dspark.rollback import HybridCache

# Options of `from_pretrained` that choose the files; a tokenizer of another revision would give other ids.
LOCATION_OPTIONS = frozenset(
    {"cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code"}
)


def load_model(path: Any, **options: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, which draws weights that the files lack at random, but refusing those.

    Raises:
        ValueError: weights are not in the files.
    """
    read: Any = AutoModelForCausalLM.from_pretrained
    model, info = read(path, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path} is no complete target: weights of {type(model).__name__} are not in its files, {len(missing)} in "
            f"all, the first {missing[0]}; they would be drawn at random. Is it a drafter, where the target belongs?"
        )
    return model


@dataclass(frozen=True)
class TargetOutput:
    """Result of a forward pass: `logits` [B, T, V] (or [B, V] from prefill) and `taps` [B, T, num_taps * hidden]
    (empty last axis if nothing is tapped).
    """

    logits: torch.Tensor
    taps: torch.Tensor


class Target(Protocol):
    """What drafting needs of a target model."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    max_positions: int

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    def encode(self, text: str) -> list[int]: ...

    def tap(self, tap_ids: Sequence[int]) -> None: ...

    def new_cache(self, batch_size: int) -> RaggedKV: ...

    def prefill(self, cache: RaggedKV, prompts: Sequence[Sequence[int]]) -> TargetOutput: ...

    def verify(self, cache: RaggedKV, tokens: torch.Tensor) -> TargetOutput: ...

    def commit(self, cache: RaggedKV, num_rows: Sequence[int]) -> None: ...


class HFTarget:
    """A Hugging Face causal LM as a target.

    `input_embedding` and `output_head` are the raw matrices [V, hidden] that a drafter may share (for a tied model
    the same tensor).
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Wrap a loaded model.

        Raises:
            ValueError: the model has layers whose state this class cannot undo (recurrent, sliding-window), or no
                decoder layers can be found.
        """
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        refuse_unsupported_layers(self.config)
        self.layers = decoder_layers(model)
        self.recurrent = attach(list(self.layers), getattr(self.config, "layer_types", None) or ())
        if model.config._attn_implementation != "sdpa":
            model.set_attn_implementation("sdpa")  # takes the mask of a ragged batch as it is
        self.vocab_size: int = self.config.vocab_size
        self.num_layers: int = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or 2**31 - 1
        accepted = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.2x
        self._captured: dict[int, torch.Tensor] = {}
        self._tap_ids: tuple[int, ...] = ()
        self._hooks: list[Any] = []

    @classmethod
    def from_pretrained(
        cls, path: str, *, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu", **options: Any
    ) -> "HFTarget":
        """Load a model and its tokenizer from a folder or the Hub; `options` go to
        `AutoModelForCausalLM.from_pretrained`, and those that say where the files are to the tokenizer's too.

        Raises:
            ValueError: the files do not hold the whole model.
        """
        model = load_model(path, dtype=dtype, attn_implementation="sdpa", **options)
        model.to(device)  # type: ignore[arg-type]
        shared = {name: value for name, value in options.items() if name in LOCATION_OPTIONS}
        return cls(model, AutoTokenizer.from_pretrained(path, **shared))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def input_embedding(self) -> torch.Tensor:
        """[V, hidden] raw embedding matrix; a scale that the model applies after the lookup is not in it."""
        return self.model.get_input_embeddings().weight

    @property
    def output_head(self) -> torch.Tensor:
        """[V, hidden] output projection."""
        return self.model.get_output_embeddings().weight

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation: those of the generation config, else the model config, and the
        tokenizer's.
        """
        found: list[int] = []
        tokenizer_eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        generation = getattr(self.model.generation_config, "eos_token_id", None)
        for value in (
            generation if generation is not None else getattr(self.config, "eos_token_id", None),
            tokenizer_eos,
        ):
            found += [] if value is None else [value] if isinstance(value, int) else list(value)
        return tuple(dict.fromkeys(found))

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text (no chat template)."""
        return list(self._need_tokenizer().encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens left out."""
        return str(self._need_tokenizer().decode(list(token_ids), skip_special_tokens=True))

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(
                "this target has no tokenizer: pass HFTarget(model, tokenizer), or give prompts as token ids"
            )
        return self.tokenizer

    def tap(self, tap_ids: Sequence[int]) -> None:
        """Choose which hidden states later passes return, in this order.

        Raises:
            ValueError: an id is outside 0..num_layers.
        """
        for tap_id in tap_ids:
            if not 0 <= tap_id <= self.num_layers:
                raise ValueError(
                    f"tap {tap_id} is outside 0..{self.num_layers}: the target has {self.num_layers} layers "
                    "(0 is the embedding output); the drafter was trained for another target"
                )
        for hook in self._hooks:
            hook.remove()
        self._tap_ids, self._hooks = tuple(tap_ids), []
        for tap_id in set(tap_ids):
            if tap_id == 0:
                self._hooks.append(self.layers[0].register_forward_pre_hook(self._capture_input, with_kwargs=True))
            else:
                self._hooks.append(self.layers[tap_id - 1].register_forward_hook(self._capture_output(tap_id)))

    def _capture_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._captured[0] = args[0] if args else kwargs["hidden_states"]

    def _capture_output(self, tap_id: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._captured[tap_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def new_cache(self, batch_size: int) -> RaggedKV:
        """Empty cache for `batch_size` requests."""
        if self.recurrent:
            specs = [layer.spec for layer in self.recurrent.values()]
            return HybridCache(self.num_layers, batch_size, self.device, specs, tuple(self.recurrent))
        return RaggedKV(self.num_layers, batch_size, self.device)

    @torch.inference_mode()
    def prefill(self, cache: RaggedKV, prompts: Sequence[Sequence[int]]) -> TargetOutput:
        """Run whole prompts and commit them.

        Args:
            cache: empty cache for B requests; changed.
            prompts: B non-empty lists of token ids, of any lengths.

        Returns:
            logits [B, V] after each prompt's last token; taps [B, longest prompt, ...], rows past a prompt's length
            are padding.
        """
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(list(prompt))
        # Logits only where some prompt ends: a full [B, T, V] would not fit.
        last = sorted({length - 1 for length in lengths})
        keep = torch.tensor(last, device=self.device)
        output = self._forward(cache, tokens.to(self.device), keep, prompt_lengths=lengths)
        column = torch.tensor([last.index(length - 1) for length in lengths], device=self.device)
        self.commit(cache, lengths)
        return TargetOutput(output.logits[torch.arange(len(prompts), device=self.device), column], output.taps)

    @torch.inference_mode()
    def verify(self, cache: RaggedKV, tokens: torch.Tensor) -> TargetOutput:
        """Run [anchor, drafts...] behind each request's committed tokens; nothing is committed.

        Args:
            cache: cache of B requests; rows are written behind the committed ones.
            tokens: [B, T] int64; row t of request b stands at position `lengths[b] + t`. Padding after a request's
                last draft may be any valid id.

        Returns:
            logits [B, T, V] and taps [B, T, ...].
        """
        return self._forward(cache, tokens, 0)

    @torch.inference_mode()
    def commit(self, cache: RaggedKV, num_rows: Sequence[int]) -> None:
        """Keep the first `num_rows[b]` rows of the last pass; the others are undone."""
        cache.advance(num_rows)

    def _forward(
        self,
        cache: RaggedKV,
        tokens: torch.Tensor,
        logits_to_keep: torch.Tensor | int,
        prompt_lengths: list[int] | None = None,
    ) -> TargetOutput:
        num_rows = tokens.shape[1]
        if isinstance(cache, HybridCache):
            cache.recurrent.begin(num_rows, prompt_lengths)
        num_slots, place = cache.max_length + num_rows, cache.place([num_rows] * len(tokens))
        positions = place.slot
        mask = torch.arange(num_slots, device=tokens.device) <= positions[:, None, :, None]
        # Only padding rows can lie beyond the last position; a learned position table has no row for them.
        positions = positions.clamp_max(self.max_positions - 1)
        self._captured.clear()
        with sdpa_kernel(ATTENTION_BACKENDS):
            output = self.model(
                input_ids=tokens,
                attention_mask=additive(mask, self.dtype),
                position_ids=positions,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_argument: _AttendedCache(cache, num_slots, place)},
            )
        taps = [self._captured[tap_id] for tap_id in self._tap_ids]
        self._captured.clear()
        return TargetOutput(
            output.logits, torch.cat(taps, dim=-1) if taps else output.logits.new_zeros(*tokens.shape, 0)
        )


class _AttendedLayer(CacheLayerMixin):
    """One layer of a `RaggedKV` behind the interface that Hugging Face attention calls."""

    is_sliding = False

    def __init__(self, cache: RaggedKV, index: int, num_slots: int, place: Place) -> None:
        super().__init__()
        self.cache, self.index, self.num_slots, self.place = cache, index, num_slots, place
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Storage is allocated by the first write."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.write(self.index, key_states.transpose(1, 2), value_states.transpose(1, 2), self.place)
        return self.cache.read(self.index, self.num_slots)

    def get_seq_length(self) -> int:
        return self.cache.max_length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.num_slots, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x


class _AttendedCache(Cache):
    def __init__(self, cache: RaggedKV, num_slots: int, place: Place) -> None:
        layers: list[Any] = [_AttendedLayer(cache, index, num_slots, place) for index in range(len(cache.keys))]
        if isinstance(cache, HybridCache):
            for number, index in enumerate(cache.recurrent_layers):
                layers[index] = ReplayLayer(cache.recurrent, number)
        super().__init__(layers=layers)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal LM, in order.

    Raises:
        ValueError: the model keeps them under another name than `layers`.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} has no decoder with a `layers` list, so hidden states cannot be tapped; "
            "supported are models built like Llama or Qwen3"
        )
    return layers


def refuse_unsupported_layers(config: Any) -> None:
    """Refuse layers that a cache cannot undo (ValueError naming the type); `attach` judges recurrent ones."""
    types = getattr(config, "layer_types", None) or []
    unsupported = sorted({kind for kind in types if kind != "full_attention" and kind not in RECURRENT_TYPES})
    if not types:
        window = getattr(config, "sliding_window", None)
        if window is not None and getattr(config, "use_sliding_window", True):
            unsupported = [f"sliding_attention (sliding_window={window})"]
        recurrent = [
            name
            for name in ("ssm_cfg", "mamba_d_state", "linear_attn_config", "linear_key_head_dim")
            if getattr(config, name, None)
        ]
        unsupported += [f"recurrent layers ({name})" for name in recurrent]
    if unsupported:
        raise ValueError(
            f"target {config.model_type!r} has layers of type {', '.join(unsupported)}; supported are full attention, "
            "Kimi Delta Attention and Gated DeltaNet: a rejected draft could not be undone in their state, and the "
            "output would drift from the target's. Choose another target"
        )
