"""CUDA graphs: capture and warm-up leave everything as it was, and a replay is the eager step, bit for bit."""

import pytest
import torch
from kda_cases import DEVICE, draw, random_layer, random_tokens

from dspark.kernels.kda import LayerTable, Rows, Window
from dspark.kernels.kda_commit import kda_commit
from dspark.kernels.kda_ring import RingCursor
from dspark.kernels.kda_verify import kda_verify

pytestmark = [
    pytest.mark.usefixtures("on_device"),
    pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU"),
]
BATCH, HEADS, KEY_DIM, VALUE_DIM, TOKENS, SLOTS = 3, 2, 16, 16, 9, 6


class Step:
    """A step of two layers in static buffers, with the convolution inside or apart."""

    def __init__(self, deferred: bool, convolved: bool) -> None:
        capacity = TOKENS + 16 if deferred else TOKENS
        self.layers = [
            random_layer(SLOTS, HEADS, KEY_DIM, VALUE_DIM, capacity, seed=7 * i, dtype=torch.float32) for i in range(2)
        ]
        self.tokens = random_tokens(BATCH, TOKENS, HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float32)
        self.cursor, self.deferred = RingCursor(SLOTS, TOKENS + 16, TOKENS, DEVICE), deferred
        channels = HEADS * (2 * KEY_DIM + VALUE_DIM)
        ring, cursor = draw(SLOTS, TOKENS + 3, channels), torch.full((BATCH,), 3)
        self.window = Window(draw(4, channels, seed=9), ring, cursor) if convolved else None
        self.slots, self.num_rows, self.accepted = torch.zeros(3, BATCH, dtype=torch.int64).unbind(0)

    def run(self) -> list[torch.Tensor]:
        if self.deferred:
            rows = self.cursor.plan(self.slots, self.num_rows, null_slot=0)
        else:
            rows = Rows.current(self.slots, self.num_rows, null_slot=0)
        outputs = [
            kda_verify(self.tokens, layer, rows, deferred=self.deferred, window=self.window) for layer in self.layers
        ]
        if self.deferred:
            self.cursor.advance(rows, self.accepted)
        else:
            kda_commit(self.table, rows, self.accepted)
        return outputs

    def state(self) -> list[torch.Tensor]:
        kept = [self.cursor.start[:SLOTS], self.cursor.held[:SLOTS]]
        kept += [] if self.window is None else [self.window.ring]
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


@pytest.mark.parametrize("convolved", [False, True], ids=["tokens", "convolution-inside"])
@pytest.mark.parametrize("deferred", [False, True], ids=["fold-every-step", "fold-when-full"])
def test_a_replay_is_the_eager_step(deferred, convolved):
    graphed, eager = Step(deferred, convolved), Step(deferred, convolved)
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
