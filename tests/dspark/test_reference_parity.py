"""The drafter against an independent one (reference.py) over random shapes and settings, in float64.

Tensor names and shapes are built here from the format description, not from the module, and must load strictly.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ReferenceDrafter

from dspark.config import DrafterConfig, LayerConfig, RopeConfig
from dspark.drafter import Drafter
from dspark.sampling import SamplingParams, SamplingTensors, Streams

# Logits reach a few tens and both sides round each operation to 1e-16; wrong rules differ by far more (last test).
# Scaled rotary frequencies are float32 in the trainers, and so in the drafter; the reference keeps all digits.
PLAIN_TOLERANCE, SCALED_TOLERANCE = 1e-9, 1e-5
ROPES = [
    RopeConfig(10000.0),
    RopeConfig(50.0),
    RopeConfig(100.0, "linear", {"factor": 4.0}),
    RopeConfig(
        100.0,
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    ),
    RopeConfig(100.0, "yarn", {"factor": 16.0, "original_max_position_embeddings": 64}),
    RopeConfig(
        100.0,
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4, "attention_factor": 0.7},
    ),
]


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes by the format description."""
    h, d, rank = config.hidden_size, config.head_dim, config.markov_rank
    q, kv, mlp = config.num_attention_heads * d, config.num_key_value_heads * d, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(config.tap_ids) * config.target_hidden_size),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        shapes |= {f"{at}.{name}.weight": (h,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (d,) for name in "qk"}
        shapes |= {f"{at}.self_attn.q_proj.weight": (q, h), f"{at}.self_attn.o_proj.weight": (h, q)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (kv, h) for name in "kv"}
        if config.attention_bias:
            for name, size in {"q": q, "k": kv, "v": kv, "o": h}.items():
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (size,)
        shapes |= {f"{at}.mlp.{name}_proj.weight": (mlp, h) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (h, mlp)
    if config.markov_kind != "none":
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    if config.markov_kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, h + rank), "markov_head.gate_proj.bias": (rank,)}
    if config.markov_kind == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + h),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if config.confidence != "none":
        shapes["confidence_head.proj.weight"] = (1, h + (rank if config.confidence == "hidden+markov" else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if config.owns_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, h)
    if config.owns_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, h)
    return shapes


def random_pair(config: DrafterConfig, target_vocab_size: int, seed: int) -> tuple[Drafter, ReferenceDrafter]:
    """The same random tensors in both; of a reduced vocabulary a random set of target ids is kept."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        norm = len(shape) == 1 and "norm" in name
        tensors[name] = rng.uniform(0.5, 1.5, shape) if norm else rng.normal(0, 0.4, shape)
    if config.reduced_vocabulary:
        kept = np.sort(rng.choice(target_vocab_size, config.draft_vocab_size, replace=False))
        tensors["d2t"] = kept - np.arange(config.draft_vocab_size)
    embedding, head = rng.normal(0, 0.4, (2, target_vocab_size, config.target_hidden_size))
    drafter = Drafter(config).double().requires_grad_(False)
    drafter.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()}, strict=True)
    drafter.share(torch.from_numpy(embedding), torch.from_numpy(head), target_vocab_size)
    return drafter.eval(), ReferenceDrafter(config, tensors, embedding, head)


@dataclass
class Request:
    """What one request has committed: taps [s, features], and its anchor at position s."""

    taps: np.ndarray
    anchor: int


def extend(drafter: Drafter, cache, requests: list[Request], new: list[np.ndarray], spare: int) -> None:
    """Give both sides the newly committed taps; rows behind a request's own (rejected, padding) are NaN."""
    width = len(drafter.config.tap_ids) * drafter.config.target_hidden_size
    rows = np.full((len(requests), max(len(taps) for taps in new) + spare, width), np.nan)
    for b, (request, taps) in enumerate(zip(requests, new, strict=True)):
        rows[b, : len(taps)] = taps
        request.taps = np.concatenate([request.taps, taps])
    drafter.extend(cache, torch.from_numpy(rows), [len(taps) for taps in new])
    assert cache.lengths.tolist() == [len(request.taps) for request in requests]


def tolerance(config: DrafterConfig) -> float:
    return PLAIN_TOLERANCE if config.rope.rope_type == "default" else SCALED_TOLERANCE


def largest_difference(drafter: Drafter, reference: ReferenceDrafter, cache, requests: list[Request], tokens) -> float:
    """Largest difference of hidden states, corrected logits and confidences along the chain of `tokens` [B][K]."""
    anchors = torch.tensor([request.anchor for request in requests])
    forced = torch.tensor(tokens)
    hidden = drafter.block_hidden(cache, anchors)
    logits = []

    def pick(i, corrected):
        logits.append(corrected)
        return forced[:, i]

    confidence = drafter.chain(hidden, anchors, forced.shape[1], pick)
    worst = 0.0
    for b, request in enumerate(requests):
        expected_hidden = reference.block_hidden(request.taps, request.anchor)
        expected = reference.forced(expected_hidden, request.anchor, tokens[b])
        assert (confidence is None) == (expected.confidence is None)
        pairs = [
            (hidden[b], expected_hidden),
            (torch.stack(logits, 1)[b, :, : expected.logits.shape[1]], expected.logits),
        ]
        if confidence is not None:
            pairs.append((confidence[b], expected.confidence))
        for ours, theirs in pairs:
            assert tuple(ours.shape) == theirs.shape
            worst = max(worst, float(np.abs(ours.numpy() - theirs).max()))
    return worst


@st.composite
def drafters(draw) -> tuple[DrafterConfig, int]:
    """A config and the target's vocabulary size."""
    kv_heads, groups = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]))
    num_layers, hidden = draw(st.integers(1, 3)), draw(st.sampled_from([6, 10, 16]))
    anchor_first = draw(st.booleans())
    vocab = draw(st.integers(5, 12))
    extra = draw(st.sampled_from(["full", "full", "reduced", "padded head", "larger embedding"]))
    owns_both = extra in ("reduced", "padded head")
    kind = draw(st.sampled_from(["none", "vanilla", "gated", "rnn"]))
    confidence = draw(st.sampled_from(["none", "hidden"] + ["hidden+markov"] * (kind != "none") * 2))
    owns_embedding = extra == "larger embedding" or draw(st.booleans())
    owns_head = owns_both or draw(st.booleans())
    input_vocab = vocab + 3 * (extra == "larger embedding")
    draft_vocab = {"reduced": vocab - 2, "padded head": vocab + 2}.get(extra, vocab)
    shares = not (owns_embedding and owns_head)
    rope = draw(st.sampled_from(ROPES))
    layer = st.builds(LayerConfig, st.none() | st.integers(1, 8), st.booleans())
    return DrafterConfig(
        family="deepspec_qwen3",
        hidden_size=hidden,
        intermediate_size=draw(st.sampled_from([5, 12])),
        num_layers=num_layers,
        num_attention_heads=kv_heads * groups,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 8])),
        vocab_size=input_vocab,
        draft_vocab_size=draft_vocab,
        block_size=draw(st.integers(1 if anchor_first else 2, 6)),
        anchor_first=anchor_first,
        mask_token_id=input_vocab - 1,
        tap_ids=draw(st.sampled_from([(3,), (0, 2), (1, 2, 4)])),
        target_hidden_size=hidden if shares else draw(st.sampled_from([4, hidden])),
        rope=rope,
        layers=tuple(draw(st.lists(layer, min_size=num_layers, max_size=num_layers))),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
        max_position_embeddings=int(
            rope.scaling.get("factor", 1) * rope.scaling.get("original_max_position_embeddings", 64)
        ),
        markov_kind=kind,
        markov_rank=0 if kind == "none" else draw(st.integers(1, 5)),
        confidence=confidence,
        owns_embedding=owns_embedding,
        owns_head=owns_head,
        attention_bias=draw(st.booleans()),
        logit_scale=draw(st.sampled_from([1.0, 0.25])),
    ), vocab


@settings(max_examples=100)
@given(drafters(), st.data())
def test_every_round_of_every_request_is_the_reference(case, data):
    config, vocab = case
    seed = data.draw(st.integers(0, 2**16))
    drafter, reference = random_pair(config, vocab, seed)
    rng = np.random.default_rng(seed + 1)
    width = len(config.tap_ids) * config.target_hidden_size

    def fresh(lengths):
        return [rng.normal(0, 1, (n, width)) for n in lengths]

    def admit(lengths):
        admitted = [Request(np.zeros((0, width)), int(rng.integers(vocab))) for _ in lengths]
        cache = drafter.new_cache(len(lengths))
        extend(drafter, cache, admitted, fresh(lengths), spare=1)
        return cache, admitted

    cache, requests = admit(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    for _ in range(data.draw(st.integers(1, 3))):
        num_drafts = data.draw(st.integers(1, config.max_draft_tokens))
        tokens = rng.integers(vocab, size=(len(requests), num_drafts)).tolist()
        assert largest_difference(drafter, reference, cache, requests, tokens) < tolerance(config)
        params = [SamplingParams(temperature=0.0)] * len(requests)
        draft = drafter.propose(
            cache,
            torch.tensor([request.anchor for request in requests]),
            SamplingTensors.stack(params, "cpu"),
            Streams.for_params(params, "cpu"),
            num_drafts,
            "greedy",
        )
        for b, request in enumerate(requests):
            expected = reference.greedy(
                reference.block_hidden(request.taps, request.anchor), request.anchor, num_drafts
            )
            assert draft.tokens[b].tolist() == expected.tokens
        accepted = data.draw(st.lists(st.integers(0, num_drafts), min_size=len(requests), max_size=len(requests)))
        extend(drafter, cache, requests, fresh([a + 1 for a in accepted]), spare=num_drafts - max(accepted))
        for request in requests:
            request.anchor = int(rng.integers(vocab))
        stay = data.draw(st.permutations(range(len(requests))))[: data.draw(st.integers(1, len(requests)))]
        cache.keep(stay)
        requests = [requests[b] for b in stay]
        if len(requests) < 3 and data.draw(st.booleans()):
            joining, admitted = admit([data.draw(st.integers(1, 12))])
            cache.append(joining)
            requests += admitted


BASE = DrafterConfig(
    family="deepspec_qwen3",
    hidden_size=10,
    intermediate_size=12,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=9,
    draft_vocab_size=7,
    block_size=4,
    anchor_first=False,
    mask_token_id=8,
    tap_ids=(1, 3),
    target_hidden_size=10,
    rope=RopeConfig(10000.0),
    layers=(LayerConfig(), LayerConfig(window=5, causal=True)),
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
    markov_kind="rnn",
    markov_rank=3,
    confidence="hidden",
)


@pytest.mark.parametrize(
    "misread",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"rope": RopeConfig(20000.0)}, id="theta"),
        pytest.param({"rope": ROPES[4]}, id="yarn"),
        pytest.param({"layers": (LayerConfig(), LayerConfig(window=6, causal=True))}, id="window-one-wider"),
        pytest.param({"layers": (LayerConfig(), LayerConfig(window=4, causal=True))}, id="window-one-narrower"),
        pytest.param({"layers": (LayerConfig(), LayerConfig(causal=True))}, id="window-lost"),
        pytest.param({"layers": (LayerConfig(), LayerConfig(window=5))}, id="causality-lost"),
        pytest.param({"layers": (LayerConfig(causal=True), LayerConfig(window=5, causal=True))}, id="all-causal"),
        pytest.param({"anchor_first": True}, id="layout"),
        pytest.param({"mask_token_id": 7}, id="mask"),
        pytest.param({"rms_norm_eps": 1e-5}, id="epsilon"),
        pytest.param({"logit_scale": 1.01}, id="scale"),
    ],
)
def test_the_comparison_sees_a_misread_setting(misread):
    drafter, _ = random_pair(BASE, 9, seed=0)
    _, reference = random_pair(BASE, 9, seed=0)
    reference.config = replace(BASE, **misread)
    rng = np.random.default_rng(3)
    requests = [Request(np.zeros((0, 20)), 4), Request(np.zeros((0, 20)), 2)]
    cache = drafter.new_cache(2)
    extend(drafter, cache, requests, [rng.normal(0, 1, (n, 20)) for n in (6, 9)], spare=0)
    difference = largest_difference(drafter, reference, cache, requests, [[1, 2, 3], [0, 5, 7]])
    assert difference > 1e-5 if misread else difference < PLAIN_TOLERANCE
