"""Accounting against what is really allocated, and against figures that others published for Kimi K3."""

from dataclasses import dataclass

import pytest
import torch
from recurrent_cases import inputs, run, specs
from transformers import KimiLinearConfig, LlamaConfig, Qwen3NextConfig

from dspark.memory import SCHEMES, RecurrentSizes, describe_memory, recurrent_memory
from dspark.rollback import RecurrentState

MIB, GIB = 2**20, 2**30
K3 = {
    "model_type": "kimi_k3",
    "linear_attn_config": {
        "kda_layers": list(range(69)),
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
TP8, TP1 = RecurrentSizes.from_config(K3, tensor_parallel=8), RecurrentSizes.from_config(K3)


@pytest.mark.parametrize(("scheme", "defer_folds"), [("ring", True), ("fold", False)])
@pytest.mark.parametrize("num_draft_tokens", [1, 8, 20])
def test_accounting_is_what_the_state_allocates(scheme, defer_folds, num_draft_tokens):
    requests = 3
    state = RecurrentState(specs(), requests, "cpu", defer_folds=defer_folds)
    run(state, inputs([0] * requests, [0] * requests, num_draft_tokens + 1))
    heads, value_dim, key_dim = specs()[0].state_shape
    sizes = RecurrentSizes(
        len(specs()), heads, key_dim, value_dim, specs()[0].conv_width, state_bytes=8, activation_bytes=8
    )
    expected = recurrent_memory(sizes, num_draft_tokens, scheme)
    assert sum(layer.checkpoint.nbytes for layer in state.layers) == requests * expected.states
    assert sum(x.nbytes for layer in state.layers for x in vars(layer.records).values()) == requests * expected.records
    assert sum(ring.nbytes for ring in state.rings) == requests * expected.window


@pytest.mark.parametrize(
    ("figure", "published"),
    [
        pytest.param(TP8.state / MIB, 51.75, id="state-TP8"),
        pytest.param(TP1.state / MIB, 414, id="state-TP1"),
        pytest.param(3 * TP8.column / MIB, 1.82, id="window-history-TP8"),
        pytest.param(11 * TP1.column / MIB, 53.4, id="window-page-TP1"),
        pytest.param(recurrent_memory(TP8, 8, "snapshots").states / MIB, 465.8, id="snapshots-TP8"),
        pytest.param(recurrent_memory(TP8, 8, "snapshots").total / MIB, 525.8, id="snapshots-with-pages-TP8"),
        pytest.param(recurrent_memory(TP1, 8, "snapshots").total / MIB, 4206, id="snapshots-with-pages-TP1"),
        pytest.param(recurrent_memory(TP8, 8, "fold").records / MIB, 7.28, id="records-of-a-window-TP8"),
        pytest.param(recurrent_memory(TP1, 8, "fold").records / MIB, 58.2, id="records-of-a-window-TP1"),
        # Published for a ring of 32 rows; ours has 25.
        pytest.param(recurrent_memory(TP8, 8, "ring").records * 32 / 25 / MIB, 25.9, id="ring-of-32-TP8"),
        pytest.param(
            recurrent_memory(RecurrentSizes.from_config(K3, tensor_parallel=8, state_bytes=2), 8).records
            * (32 / 25 / MIB),
            19.4,
            id="ring-of-32-bfloat16",
        ),
        pytest.param(64 * recurrent_memory(TP8, 7, "snapshots").total / GIB, 28.907, id="64-requests-of-8-slots"),
    ],
)
def test_figures_for_kimi_k3(figure, published):
    """Published to three or four digits."""
    assert figure == pytest.approx(published, rel=4e-3)


@dataclass(frozen=True)
class PagedPool:
    """A paged cache in which attention blocks and recurrent states share one page size, as in vLLM.

    Attributes:
        pool_bytes: memory for all pages.
        attention_bytes: of one token in one attention layer.
        layers_per_group: layers that share a block table; each group takes a page a layer for a block.
        recurrent_groups: groups of recurrent layers, pads included; attention layers are one more group.
        granularity: the tokens of a block are a multiple of this.
    """

    pool_bytes: int
    attention_bytes: int
    layers_per_group: int
    recurrent_groups: int
    granularity: int = 16

    def block_tokens(self, page_bytes: int) -> int:
        """Tokens of an attention block, so that it is no smaller than a recurrent page of one layer."""
        return -(-page_bytes // (self.attention_bytes * self.granularity)) * self.granularity

    def requests(self, page_bytes: int, states: int, max_length: int) -> float:
        """How many requests of `max_length` tokens fit when each keeps `states` recurrent pages of `page_bytes` a
        layer."""
        tokens = self.block_tokens(page_bytes)
        blocks = self.pool_bytes // (self.layers_per_group * tokens * self.attention_bytes)
        return blocks / (-(-max_length // tokens) + self.recurrent_groups * states)


def test_the_reported_gain_in_capacity():
    """vLLM's first ReplaySSM reports 11% more requests in 46.48 GiB. It follows from records inside the page, 576
    bytes a token (MLA in fp8), 24 + 5 attention layers beside three groups of recurrent ones and pads, and three
    states a request besides the drafts'. The settings are a fit: they show that the arithmetic is consistent with the
    report, not that its author used them."""
    pool = PagedPool(int(46.48 * GIB), 576, 29, 3)
    layers, window = TP8.num_layers, 8
    page = (TP8.state + 10 * TP8.column) // layers
    replaying = page + window * TP8.record // layers
    assert (pool.block_tokens(page), pool.block_tokens(replaying)) == (1536, 1696)
    gain = pool.requests(replaying, 3, 262144) / pool.requests(page, 3 + window - 1, 262144) - 1
    assert gain == pytest.approx(0.10967, abs=1e-5)


def test_configurations_of_both_forms_agree():
    kimi = KimiLinearConfig()
    expected = RecurrentSizes(num_layers=21, num_heads=32, key_dim=128, value_dim=128)
    assert RecurrentSizes.from_config(kimi) == expected
    raw = {
        "linear_attn_config": {
            "kda_layers": [i + 1 for i, kind in enumerate(kimi.layer_types) if kind == "linear_attention"]
        }
    }
    raw["linear_attn_config"] |= {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
    assert RecurrentSizes.from_config({"text_config": raw}) == expected


def test_gated_delta_net_convolves_fewer_key_heads():
    """Qwen3-Next: 36 layers, 16 heads of keys and 32 of values, 128 each: a state of 72 MiB and 8,192 channels."""
    sizes = RecurrentSizes.from_config(Qwen3NextConfig())
    assert sizes.state == 72 * MIB
    assert sizes.column == 36 * 8192 * 2


def test_every_scheme_is_described():
    lines = describe_memory(TP8, 8)
    assert [line.split(":")[0] for line in lines] == list(SCHEMES)
    assert lines[2] == "ring: 79.24 MiB a request (states 51.75, records 20.21, window 7.28)"
    assert torch.tensor([recurrent_memory(TP8, k, "snapshots").total for k in range(9)]).diff().min() > TP8.state


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda: RecurrentSizes.from_config(LlamaConfig()),
            "'llama' has no Kimi Delta Attention or Gated",
            id="no-kda",
        ),
        pytest.param(
            lambda: RecurrentSizes.from_config(K3, tensor_parallel=7), "tensor_parallel=7 does not divide", id="tp"
        ),
        pytest.param(lambda: recurrent_memory(TP8, 8, "undo"), "scheme='undo' is unknown", id="scheme"),
        pytest.param(lambda: recurrent_memory(TP8, -1), "num_draft_tokens=-1", id="drafts"),
    ],
)
def test_bad_requests_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
