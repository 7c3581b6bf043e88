"""From stored tensor names to canonical ones.

Both supported packagings share the names of `expected.py`. What varies: an optional `model.` prefix, fused q/k/v and
gate/up projections, some aliases of other tools, and tensors that are training leftovers. A canonical tensor is
therefore a stored one, or a range of its rows.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dspark.families.container import StoredTensor
from dspark.families.findings import refusal

IGNORED = re.compile(r"(^|\.)rotary_emb\.|^mask_embedding|^verifier_lm_head\.|^verifier_norm\.|num_batches_tracked$")
ALIASES = (
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
QUANTISED = re.compile(r"(_scale|_scale_2|_scale_inv|\.scale|_zero_point|_packed|\.qweight|\.qzeros|\.scales|g_idx)$")
FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class TensorSource:
    """Where a canonical tensor comes from: rows `start:stop` of a stored tensor, or all of it (`start` is None)."""

    stored: StoredTensor
    shape: tuple[int, ...]
    start: int | None = None

    @property
    def dtype(self) -> str:
        return self.stored.dtype


@dataclass(frozen=True)
class NamedTensors:
    """Canonical name -> source, and stored names that are ignored on purpose."""

    sources: Mapping[str, TensorSource]
    ignored: tuple[str, ...]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a canonical tensor, None if the checkpoint has none."""
        source = self.sources.get(name)
        return None if source is None else source.shape


def canonical_name(stored: str) -> str:
    """Stored name without its `model.` prefix, aliases resolved."""
    name = stored.removeprefix("model.")
    for alias, canonical in ALIASES:
        if name.startswith(alias):
            return canonical + name.removeprefix(alias)
    return name


def name_tensors(stored: Iterable[StoredTensor], size: Mapping[str, int]) -> NamedTensors:
    """Map every stored tensor.

    Args:
        stored: headers of all tensors.
        size: of the backbone, by names of `DrafterConfig`; cuts fused tensors.

    Raises:
        CheckpointError: two stored tensors are the same canonical one, weights are quantised, or a fused tensor has
        the wrong number of rows.
    """
    query, kv = (size[name] * size["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    fused_rows = {"self_attn.qkv_proj": (query, kv, kv), "mlp.gate_up_proj": (size["intermediate_size"],) * 2}
    sources: dict[str, TensorSource] = {}
    ignored: list[str] = []
    for tensor in stored:
        name = canonical_name(tensor.name)
        if "mask_hidden" in name:
            raise refusal(
                f"tensor {tensor.name}",
                "no mask_hidden",
                "DSpark embeds mask slots with the mask_token_id row.",
                "This is a drafter of another kind; use the loader of its own project.",
            )
        if IGNORED.search(name):
            ignored.append(tensor.name)
            continue
        _refuse_quantised(tensor, name)
        for canonical, source in _split(name, tensor, fused_rows).items():
            if canonical in sources:
                raise refusal(
                    f"{canonical} is given twice, by {sources[canonical].stored.name} and {tensor.name}",
                    "one of them (fused or split, prefixed or not)",
                    "Which of the two is used would depend on the order of the file. Remove the stale one.",
                )
            sources[canonical] = source
    return NamedTensors(sources, tuple(ignored))


def _split(name: str, tensor: StoredTensor, fused_rows: Mapping[str, tuple[int, ...]]) -> dict[str, TensorSource]:
    fused = next((key for key in FUSED if f".{key}." in name), None)
    if fused is None:
        return {name: TensorSource(tensor, tensor.shape)}
    sizes = fused_rows[fused]
    if not tensor.shape or tensor.shape[0] != sum(sizes):
        raise refusal(
            f"{tensor.name} has shape {list(tensor.shape)}",
            f"{'+'.join(map(str, sizes))} rows of {FUSED[fused]}",
            "It would be cut at the wrong rows. Check the head counts, head_dim and intermediate_size in config.json.",
        )
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return {
        name.replace(fused, part): TensorSource(tensor, (size, *tensor.shape[1:]), start)
        for part, size, start in zip(FUSED[fused], sizes, starts, strict=True)
    }


def _refuse_quantised(tensor: StoredTensor, name: str) -> None:
    is_table = name in {"d2t", "t2d"}  # integer by nature; their types are checked with the vocabulary
    if QUANTISED.search(name) or (tensor.dtype not in FLOATING and not is_table):
        raise refusal(
            f"tensor {tensor.name} of type {tensor.dtype}",
            "plain float64, float32, float16 or bfloat16 weights",
            "Packed or scaled numbers would be used as if they were the weights.",
            "Quantised drafters are not supported; use the unquantised checkpoint.",
        )
