"""CUDA graphs: capture and warm-up leave everything as it was, and a replay is the eager step, bit for bit."""

import pytest
import torch
from kda_cases import DEVICE, draw, random_layer, random_tokens

from dspark.kernels.conv_window import conv_window
from dspark.kernels.kda import KDALayer, LayerTable, Rows, Tokens
from dspark.kernels.kda_commit import kda_commit
from dspark.kernels.kda_ring import RingCursor
from dspark.kernels.kda_verify import kda_verify

pytestmark = [
    pytest.mark.usefixtures("on_device"),
    pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU"),
]
BATCH, HEADS, KEY_DIM, VALUE_DIM, TOKENS, SLOTS = 3, 2, 16, 16, 9, 6


class Step:
    """A step of two layers in static buffers, each a convolution and the verification that overlaps it."""

    def __init__(self, capacity: int) -> None:
        self.layers = [
            random_layer(SLOTS, HEADS, KEY_DIM, VALUE_DIM, capacity, seed=7 * i, dtype=torch.float32) for i in range(2)
        ]
        self.tokens = random_tokens(BATCH, TOKENS, HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float32)
        self.deferred = capacity > TOKENS
        self.cursor = RingCursor(SLOTS, max(capacity, 2 * TOKENS), TOKENS, DEVICE)
        channels = HEADS * (2 * KEY_DIM + VALUE_DIM)
        self.inputs, self.weight = draw(BATCH, TOKENS, channels, seed=8), draw(channels, 4, seed=9)
        self.window, self.window_cursor = draw(SLOTS, TOKENS + 3, channels), torch.full((BATCH,), 3)
        self.slots, self.num_rows, self.accepted = torch.zeros(3, BATCH, dtype=torch.int64).unbind(0)

    def run(self) -> list[torch.Tensor]:
        if self.deferred:
            rows = self.cursor.plan(self.slots, self.num_rows, null_slot=0)
        else:
            rows = Rows.current(self.slots, self.num_rows, null_slot=0)
        outputs = [self.layer(layer, rows) for layer in self.layers]
        if self.deferred:
            self.cursor.advance(rows, self.accepted)
        else:
            kda_commit(self.table, rows, self.accepted)
        return outputs

    def layer(self, layer: KDALayer, rows: Rows) -> torch.Tensor:
        mixed = conv_window(self.inputs, self.weight, self.window, rows.slots, self.window_cursor, rows.num_rows)
        dims = [HEADS * KEY_DIM, HEADS * KEY_DIM, HEADS * VALUE_DIM]
        query, key, value = (x.unflatten(2, (HEADS, -1)) for x in mixed.split(dims, dim=2))
        tokens = Tokens(query, key, value, self.tokens.gate, self.tokens.beta)
        return kda_verify(tokens, layer, rows, deferred=self.deferred, rows_settled=True)

    def state(self) -> list[torch.Tensor]:
        kept = [self.cursor.start[:SLOTS], self.cursor.held[:SLOTS], self.window]
        for layer in self.layers:
            kept += [layer.checkpoint, *vars(layer.records).values()]
        return kept

    def set(self, active: int, seed: int) -> None:
        """`active` rows take part, the others are padding at the null slot 0."""
        generator = torch.Generator().manual_seed(seed)
        slots = 1 + torch.randperm(SLOTS - 1, generator=generator, device="cpu")[:BATCH]
        self.slots.copy_(torch.where(torch.arange(BATCH, device="cpu") < active, slots, 0))
        num_rows = torch.randint(1, TOKENS + 1, (BATCH,), generator=generator, device="cpu")
        self.num_rows.copy_(num_rows)
        self.accepted.copy_((num_rows * torch.rand(BATCH, generator=generator, device="cpu")).long())

    @property
    def table(self) -> LayerTable:
        if not hasattr(self, "_table"):
            self._table = LayerTable(self.layers)
        return self._table


@pytest.mark.parametrize("capacity", [TOKENS, 2 * TOKENS, TOKENS + 16], ids=["commit", "fold-inside", "fold-when-full"])
def test_a_replay_is_the_eager_step(capacity):
    graphed, eager = Step(capacity), Step(capacity)
    before = [x.clone() for x in graphed.state()]
    graphed.table  # noqa: B018 (made before the capture, which must not copy from the host)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphed.run()  # every row is padding: this compiles and nothing else
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = graphed.run()
    for got, kept in zip(graphed.state(), before, strict=True):
        assert torch.equal(got.nan_to_num(7.0), kept.nan_to_num(7.0)), "warm-up or capture changed something"
    for step, active in enumerate([BATCH, 1, 2, 0, BATCH, BATCH, 2, BATCH]):
        for one in (graphed, eager):
            one.set(active, seed=step)
        graph.replay()
        expected = eager.run()
        for a, b in zip([*outputs, *graphed.state()], [*expected, *eager.state()], strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), f"step {step}"
    for layer in graphed.layers:
        assert layer.records.key[0].isnan().all(), "the null slot was written"
