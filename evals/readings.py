"""Ways to read one checkpoint: what `dspark doctor` tries beside the declared one.

A reading is a drafter that shares the weights and differs in one thing that files state wrongly, or tools read
differently, without any shape to show it. The topics, each with the fault it stands for:

    taps        ids off by one (DeepSpec counts layer outputs, speculators hidden states)
    layout      anchor-first or 1+N
    mask        filler token
    rope        pairs interleaved instead of halves; another base
    causality   block rows see the later ones, or not
    embedding   scaled by sqrt(hidden), or back; the target's instead of an own one
    head        the target's, or the embedding, instead of an own one
    vocabulary  d2t as ids instead of offsets
    norm        weights stored without the 1

`alternatives` varies one topic at a time, so that a checkpoint with two faults is found by going on from the better
reading. Read next: `dspark.evals.doctor`. Two commands that try them:

    dspark doctor
    dspark doctor TARGET DRAFTER
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dspark.config import DrafterConfig, LayerConfig
from dspark.drafter import Drafter, variant
from dspark.target import HFTarget

Tried = tuple[str, str, Drafter]  # value, remedy and drafter of a `Reading`

MAX_MASKS = 16
THETAS = (1e4, 1e6)


@dataclass(frozen=True)
class Reading:
    """One reading.

    Attributes:
        topic: what it is about.
        value: what is read, in words.
        remedy: what to change in the checkpoint if this reading is the right one.
        drafter: the drafter read so.
    """

    topic: str
    value: str
    remedy: str
    drafter: Drafter


def alternatives(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Reading]:
    """Every reading that differs from `base` in one topic.

    Args:
        base: the declared reading, or a better one found already.
        target: the target.
        raw: the checkpoint's config.json, for values that stand in it under other keys.
    """
    for topic, tried in TOPICS.items():
        for value, remedy, drafter in tried(base, target, raw):
            yield Reading(topic, value, remedy, drafter)


def tap_ids_tried(config: DrafterConfig, num_layers: int, rounds: int) -> list[int]:
    """Every state that some reading taps: the declared ones and those up to `rounds` layers beside them."""
    near = {tap + shift for tap in config.tap_ids for shift in range(-rounds, rounds + 1)}
    return sorted(tap for tap in near if 0 <= tap <= num_layers)


def keys_of(config: DrafterConfig) -> dict[str, str]:
    """Where the packaging keeps what the topics are about."""
    if config.family == "speculators":
        return {"taps": "aux_hidden_state_layer_ids", "backbone": "transformer_layer_config."}
    return {"taps": "target_layer_ids", "backbone": ""}


def _taps(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Tried]:
    config = base.config
    offset = 0 if config.family == "speculators" else 1
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in config.tap_ids)
        if taps[0] < 0 or taps[-1] > target.num_layers:
            continue
        stated = [tap - offset for tap in taps]
        yield (
            f"every tap one layer {'earlier' if shift < 0 else 'later'}",
            f"write {keys_of(config)['taps']}={stated}: the ids were counted by the other convention (DeepSpec counts "
            "layer outputs from 0, speculators hidden states, whose 0 is the embedding)",
            variant(base, replace(config, tap_ids=taps)),
        )


def _layout(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Tried]:
    anchor_first = not base.config.anchor_first
    if base.config.block_size < 2:
        return
    name = "anchor-first: row 0 drafts" if anchor_first else "1+N: row 0 only re-states the anchor"
    yield (
        name,
        f"write sample_from_anchor={str(anchor_first).lower()} (and speculative_tokens="
        f"{base.config.block_size - (not anchor_first)} where the config has it), or, if it says neither, load with "
        f"--layout {'anchor' if anchor_first else 'fill'}",
        variant(base, replace(base.config, anchor_first=anchor_first)),
    )


def _masks(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Tried]:
    for token in mask_candidates(base.config, target, raw):
        drafter = variant(base, replace(base.config, mask_token_id=token))
        yield f"mask token {token}", f"write mask_token_id={token}", drafter


def mask_candidates(config: DrafterConfig, target: HFTarget, raw: Mapping[str, Any]) -> list[int]:
    """Tokens that trainers use as filler: special ones, the first behind the tokenizer's, and the ends of the table."""
    tokenizer: Any = target.tokenizer
    found: list[int | None] = [raw.get(key) for key in ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id")]
    if tokenizer is not None:
        found += [getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "unk", "eos", "bos")]
        found.append(len(tokenizer))
        found += sorted(tokenizer.added_tokens_decoder, reverse=True)
    found += [config.vocab_size - 1, target.vocab_size - 1, 0]
    whole = [token for token in found if isinstance(token, int) and 0 <= token < config.vocab_size]
    return [token for token in dict.fromkeys(whole) if token != config.mask_token_id][:MAX_MASKS]


def _rope(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Tried]:
    yield (
        "rotary pairs interleaved",
        "the weights are for interleaved pairs (rope_is_neox_style=false), which is not supported: reorder the rows of "
        "every head of q_proj and k_proj, and q_norm and k_norm, to even ones first, then odd ones",
        variant(base, layers=_reordered_heads(base)),
    )
    place = f"{keys_of(base.config)['backbone']}rope_parameters.rope_theta"
    stated = [raw.get("rope_theta"), getattr(target.config, "rope_theta", None)]
    stated.append((getattr(target.config, "rope_parameters", None) or {}).get("rope_theta"))
    known = [float(value) for value in stated if isinstance(value, int | float)]
    for theta in dict.fromkeys([*known, *THETAS]):
        if theta != base.config.rope.theta:
            drafter = variant(base, replace(base.config, rope=replace(base.config.rope, theta=theta)))
            yield f"rotary base {theta:g}", f"write {place}={theta:g}", drafter


def _reordered_heads(base: Drafter) -> nn.ModuleList:
    """Layers in which halves are the pairs that were interleaved: (0, 2, 4, ..., 1, 3, 5, ...) of every head."""
    size = base.config.head_dim
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)]).to(base.device)
    layers = copy.deepcopy(base.layers)
    for layer in layers:
        attention: Any = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj):
            weight = projection.weight
            weight.copy_(weight.unflatten(0, (-1, size))[:, order].flatten(0, 1))
            if projection.bias is not None:
                projection.bias.copy_(projection.bias.unflatten(0, (-1, size))[:, order].flatten())
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.copy_(norm.weight[order])
    return layers


def _causality(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Tried]:
    if base.config.block_size < 2:
        return
    causal = not all(layer.causal for layer in base.config.layers)
    layers = tuple(LayerConfig(layer.window, causal) for layer in base.config.layers)
    value = f"block rows {'do not see' if causal else 'see'} the rows behind them"
    yield value, f"write is_causal={str(causal).lower()}", variant(base, replace(base.config, layers=layers))


def _embedding(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Tried]:
    root = float(base.config.hidden_size) ** 0.5
    for scale, words, remedy in (
        (root, "times", "the drafter was trained on scaled embeddings: multiply embed_tokens.weight by that factor"),
        (1 / root, "divided by", "the stored embeddings are scaled already: divide embed_tokens.weight by that factor"),
    ):
        scaled = variant(base, embed_tokens=None)
        scaled._shared_embedding = base.embedding_weight * scale
        yield (f"embeddings {words} sqrt(hidden_size) = {root:.4g}", f"{remedy} (and ship it)", scaled)
    theirs = target.input_embedding.detach()
    if base.embed_tokens is None or theirs.shape[1] != base.config.hidden_size:
        return
    own = base.embed_tokens.weight
    if len(theirs) >= len(own) and not torch.equal(theirs[: len(own)].to(own), own):
        shared = variant(base, replace(base.config, owns_embedding=False), embed_tokens=None)
        shared._shared_embedding = theirs[: len(own)].to(own)
        yield (
            "the target's embedding in place of the checkpoint's own",
            "leave embed_tokens.weight out of the checkpoint, so that the target's is used",
            shared,
        )


def _head(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Tried]:
    rows = base.config.draft_vocab_size
    current = base.head_weight
    others = {
        "the target's head": (target.output_head.detach(), "leave lm_head.weight out, so that the target's is used"),
        "the embedding as head": (base.embedding_weight, "ship the embedding as lm_head.weight: the two were tied"),
    }
    for name, (weight, remedy) in others.items():
        if base.d2t is not None or len(weight) < rows or weight.shape[1] != base.config.hidden_size:
            continue
        weight = weight[:rows].to(current)
        if torch.equal(weight, current):
            continue
        reading = variant(base, lm_head=None)
        reading._shared_head = weight
        yield name, remedy, reading


def _vocabulary(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Tried]:
    if base.d2t is None:
        return
    order = torch.arange(len(base.d2t), device=base.d2t.device)
    offsets, zeros = base.d2t - order, torch.zeros_like(base.d2t)
    for name, table, remedy in (
        ("d2t as target ids", offsets, "store offsets in d2t: d2t[i] = target id - i; it holds the ids themselves"),
        ("draft ids as target ids", zeros, "store zeros in d2t: draft ids are the target's own"),
    ):
        ids = order + table
        if bool((ids >= 0).all() and (ids < base.target_vocab_size).all()) and not torch.equal(table, base.d2t):
            reading = variant(base)
            reading._buffers["d2t"] = table
            yield name, remedy, reading


def _norms(base: Drafter, target: HFTarget, raw: Mapping[str, Any]) -> Iterator[Tried]:
    modules: dict[str, nn.Module | None] = {
        name: copy.deepcopy(getattr(base, name)) for name in ("layers", "norm", "hidden_norm")
    }
    for root in modules.values():
        assert root is not None
        for name, parameter in root.named_parameters():
            if parameter.ndim == 1 and not name.endswith("bias"):
                parameter.add_(1)
    remedy = "the norms are stored as w - 1: add 1 to every norm weight"
    yield "1 added to every norm weight", remedy, variant(base, **modules)


TOPICS: dict[str, Callable[[Drafter, HFTarget, Mapping[str, Any]], Iterator[Tried]]] = {
    "taps": _taps,
    "layout": _layout,
    "mask": _masks,
    "rope": _rope,
    "causality": _causality,
    "embedding": _embedding,
    "head": _head,
    "vocabulary": _vocabulary,
    "norm": _norms,
}
