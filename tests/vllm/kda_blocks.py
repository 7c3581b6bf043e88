"""A miniature of how vLLM serves KDA layers: blocks, pages, packed steps, align mode; beside it a float64 recurrence.

Every request follows a fixed line of layer inputs; what a step drafts beyond its kept part is other, random input. The
oracle goes over the line one token at a time, convolution included.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from dspark.kernels.kda import Gate, KDALayer, LayerTable, Records, Tokens, kda_scan
from dspark.kernels.kda_commit import kda_commit
from dspark.kernels.kda_verify import kda_verify
from dspark.vllm.kda_conv import ConvPages, ConvTable, conv_verify
from dspark.vllm.kda_state import AlignedBlocks, StepRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, DIM, WIDTH = 2, 16, 4
CHANNELS = 3 * HEADS * DIM
NULL = 0


def draw(*shape, seed, dtype=torch.float64):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(DEVICE, dtype)


def inputs_of(count, seed, layers, dtype):
    """For each layer: the inputs of convolution and gate, and beta, of `count` tokens."""
    return [
        SimpleNamespace(
            qkv=draw(count, CHANNELS, seed=seed * 100 + layer, dtype=dtype),
            gate=draw(count, HEADS, DIM, seed=seed * 100 + layer + 30, dtype=dtype),
            beta=draw(count, HEADS, seed=seed * 100 + layer + 60, dtype=dtype),
        )
        for layer in range(layers)
    ]


class Request:
    """A line of inputs, how much of it the engine keeps, and the oracle's state and history after every token."""

    def __init__(self, engine, seed, length=64) -> None:
        self.line = inputs_of(length, seed, len(engine.layers), engine.dtype)
        self.computed, self.column = 0, -1
        self.oracle = [
            oracle(x, engine.weight, layer.gate, None) for x, layer in zip(self.line, engine.layers, strict=True)
        ]

    def state(self, layer, count):
        return self.oracle[layer].states[count]

    def history(self, layer, count):
        padded = F.pad(self.line[layer].qkv, (0, 0, WIDTH - 1, 0))
        return padded[count : count + WIDTH - 1].T


def oracle(x, weight, gate, before):
    """Outputs and states (the first is the initial one) over the inputs `x`; `before` is (state, history [C, 3])."""
    state, history = before or (torch.zeros(HEADS, DIM, DIM), torch.zeros(CHANNELS, WIDTH - 1))
    line = torch.cat([history.double().T, x.qkv.double()])
    mixed = F.silu((line.unfold(0, WIDTH, 1) * weight.double()).sum(-1))
    parts = (part.unflatten(-1, (HEADS, DIM))[None] for part in mixed.split(HEADS * DIM, dim=-1))
    tokens = Tokens(*parts, x.gate.double()[None], x.beta.double()[None])
    outputs, _, states = kda_scan(tokens, gate, state.double()[None])
    return SimpleNamespace(outputs=outputs[0], states=torch.cat([state.double()[None], states[0]]))


class Served:
    """Layers, blocks and block tables. Without `align` a request has one block; with it one for each `align` tokens."""

    def __init__(
        self,
        *,
        window=5,
        num_layers=2,
        align=None,
        dim_first=False,
        dtype=torch.float64,
        lower_bound=-5.0,
        error=1e-12,
        inside=False,
    ) -> None:
        self.window, self.align, self.dtype, self.error, self.inside = window, align, dtype, error, inside
        state_dtype = dtype
        self.num_blocks, max_rows = 40, 6
        self.weight = draw(CHANNELS, WIDTH, seed=1, dtype=dtype)
        self.layers, self.pages = [], []
        for i in range(num_layers):
            gate = Gate(
                draw(HEADS, seed=i + 2).float().to(torch.float64 if dtype == torch.float64 else torch.float32),
                draw(HEADS, DIM, seed=i + 9, dtype=torch.float64 if dtype == torch.float64 else torch.float32),
                lower_bound,
            )
            # A page holds both states, so that the distance between slots is more than either of them.
            room = CHANNELS * (WIDTH + window - 2)
            memory = torch.full((self.num_blocks, room + HEADS * DIM * DIM + 48), float("nan"), dtype=state_dtype)
            conv, state = memory[:, :room], memory[:, room : room + HEADS * DIM * DIM]
            shape = (CHANNELS, WIDTH + window - 2) if dim_first else (WIDTH + window - 2, CHANNELS)
            conv = conv.unflatten(1, shape)
            shape = (max_rows, HEADS, window, DIM)
            records = Records(*(torch.full(shape, float("nan"), dtype=d) for d in (dtype, dtype, dtype)))
            self.layers.append(KDALayer(state.unflatten(1, (HEADS, DIM, DIM)), records, gate))
            spare = torch.full((max_rows, CHANNELS), float("nan"), dtype=dtype)
            self.pages.append(ConvPages(conv if dim_first else conv.transpose(1, 2), spare))
        self.step_rows = StepRows(max_rows, DEVICE)
        self.table, self.conv_table = LayerTable(self.layers), ConvTable(self.pages, WIDTH)
        self.free = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(7)).add(1).tolist()
        self.requests, self.blocks, self.cached, self.seed = [], [], {}, 50

    def admit(self, computed) -> int:
        """A request whose first `computed` tokens were prefilled; returns its index."""
        self.seed += 1
        request = Request(self, self.seed)
        columns = 64 // self.align if self.align else 1
        self.requests.append(request)
        self.blocks.append([self.free.pop() for _ in range(columns)])
        request.computed = computed
        request.column = (computed - 1) // self.align if self.align else 0
        self.write(len(self.requests) - 1, request.column, computed)
        return len(self.requests) - 1

    def write(self, index, column, count) -> None:
        block, request = self.blocks[index][column], self.requests[index]
        for i, (layer, pages) in enumerate(zip(self.layers, self.pages, strict=True)):
            layer.checkpoint[block] = request.state(i, count).to(layer.checkpoint.dtype)
            pages.pages[block] = float("nan")
            pages.pages[block, :, : WIDTH - 1] = request.history(i, count)

    def step(self, plan, *, padding=0, with_requests=False) -> None:
        """Verify and commit: `plan` is [(request, tokens, kept)] in row order, `padding` null rows behind.

        `with_requests`: the batch has other requests in front, so that rows and requests are numbered differently.
        """
        self.seed += 1
        drafted = {i: self.drafted(i, n, kept) for i, n, kept in plan}
        indices = [self.run_block(i, n) for i, n, _ in plan] + [NULL] * padding
        starts = torch.tensor([0] + [n for _, n, _ in plan], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        starts = torch.cat([starts, starts[-1:].expand(padding)])
        # vLLM hands over a column of a wider table.
        indices = torch.tensor([[i, 99] for i in indices], dtype=torch.int32)[:, 0]
        untouched = self.snapshot()
        rows = self.step_rows.verify(indices, starts)
        self.verify(plan, drafted, rows, int(starts[-1]))
        self.check_untouched(untouched, [] if not plan else [self.run_block(i, n) for i, n, _ in plan])
        self.poison_rejected(plan)
        self.commit(plan, indices, starts, with_requests, padding)

    def drafted(self, index, count, kept):
        """The layers' inputs of a window: the request's own line up to `kept`, then others."""
        request, out = self.requests[index], []
        others = inputs_of(count, self.seed * 10 + index, len(self.layers), self.dtype)
        for own, other in zip(request.line, others, strict=True):
            take = slice(request.computed, request.computed + kept)
            out.append(
                SimpleNamespace(
                    **{
                        name: torch.cat([getattr(own, name)[take], getattr(other, name)[kept:]])
                        for name in ("qkv", "gate", "beta")
                    }
                )
            )
        return out

    def run_block(self, index, count) -> int:
        """vLLM's preprocessing: the state is copied to the block that the window's last position lies in."""
        request = self.requests[index]
        if self.align:
            column = (request.computed + count - 1) // self.align
            if column != request.column:
                old, new = self.blocks[index][request.column], self.blocks[index][column]
                for layer, pages in zip(self.layers, self.pages, strict=True):
                    layer.checkpoint[new], pages.pages[new] = layer.checkpoint[old], pages.pages[old]
                request.column = column
        return self.blocks[index][request.column]

    def verify(self, plan, drafted, rows, total) -> None:
        spare_tokens = 3  # a graph is captured for more tokens than there are
        for i, layer in enumerate(self.layers):
            packed = {
                name: torch.cat(
                    [getattr(drafted[index][i], name) for index, _, _ in plan]
                    + [torch.full_like(getattr(self.requests[0].line[i], name)[:spare_tokens], float("nan"))]
                )
                for name in ("qkv", "gate", "beta")
            }
            wide = torch.cat([packed["qkv"], packed["qkv"][:, :5]], 1)[:, :CHANNELS]  # a view of a wider projection
            beta = torch.cat([packed["beta"], packed["beta"]], 1)[:, :HEADS]
            out = torch.full((1, total + spare_tokens, HEADS, DIM), 7.0, dtype=self.dtype)
            result = self.layer_outputs(i, wide, packed["gate"][None], beta[None], rows, out)
            assert result.data_ptr() == out.data_ptr()
            assert torch.equal(out[:, total:], torch.full_like(out[:, total:], 7.0)), "wrote beyond the last row"
            first = 0
            for index, count, _ in plan:
                request = self.requests[index]
                before = request.state(i, request.computed), request.history(i, request.computed)
                expected = oracle(drafted[index][i], self.weight, layer.gate, before).outputs
                close(out[0, first : first + count], expected, self.error)
                first += count

    def layer_outputs(self, i, mixed_qkv, gate, beta, rows, out):
        """Verify one layer's packed tokens into `out`; `inside`: by a verification that convolves."""
        window = self.pages[i].window(self.weight) if self.inside else None
        if window is None:
            mixed_qkv = conv_verify(mixed_qkv, self.weight, self.pages[i], rows, self.window)
        query, key, value = (x.unflatten(-1, (HEADS, DIM))[None] for x in mixed_qkv.split(HEADS * DIM, dim=-1))
        tokens, given = Tokens(query, key, value, gate, beta), {"deferred": False, "out": out}
        return kda_verify(tokens, self.layers[i], rows, window=window, rows_settled=window is not None, **given)

    def fold(self, accepted, indices, starts, requests, blocks) -> None:
        """Commit all layers."""
        step = self.step_rows.commit(accepted, indices, starts, requests, blocks)
        self.conv_table.commit(step)
        kda_commit(self.table, step.rows, step.num_records, destinations=step.destinations, boundary=step.boundary)

    def snapshot(self):
        return [
            (layer.checkpoint.clone(), pages.pages.clone())
            for layer, pages in zip(self.layers, self.pages, strict=True)
        ]

    def check_untouched(self, before, running) -> None:
        """Verification writes the columns behind the history of the rows' own blocks, and nothing else."""
        for (state, page), layer, pages in zip(before, self.layers, self.pages, strict=True):
            assert same(state, layer.checkpoint), "verification changed a state"
            page[running, :, WIDTH - 1 :] = pages.pages[running, :, WIDTH - 1 :]
            assert same(page, pages.pages), "verification changed a history, or another block"

    def poison_rejected(self, plan) -> None:
        for row, (index, _, kept) in enumerate(plan):
            block = self.blocks[index][self.requests[index].column]
            for layer, pages in zip(self.layers, self.pages, strict=True):
                for store in vars(layer.records).values():
                    store[row, :, kept:] = float("nan")
                pages.pages[block, :, WIDTH - 1 + kept :] = float("nan")
                if kept < self.window:
                    pages.spare[row] = float("nan")

    def commit(self, plan, indices, starts, with_requests, padding) -> None:
        front = 2 if with_requests else 0  # other requests of the batch, that are no rows
        order = [front + row for row in range(len(plan))]
        if with_requests:
            order.reverse()
        place = dict(zip(order, plan, strict=True))
        size = front + len(plan) + padding
        accepted = torch.full((size,), 3, dtype=torch.int32)
        table = torch.full((size, max(1, len(self.blocks[0]))), NULL, dtype=torch.int32)
        computed = torch.full((size,), 5, dtype=torch.int32)
        for request, (index, _, kept) in place.items():
            accepted[request], computed[request] = kept, self.requests[index].computed
            table[request] = torch.tensor(self.blocks[index])
        requests = torch.tensor(order + [0] * padding, dtype=torch.int32) if with_requests else None
        blocks = AlignedBlocks(table, computed, self.align) if self.align else None
        before = self.snapshot()
        self.fold(accepted, indices, starts, requests, blocks)
        changed = set()
        for index, _, kept in plan:
            changed |= self.keep(index, kept)
        for (state, page), layer, pages in zip(before, self.layers, self.pages, strict=True):
            rest = [b for b in range(self.num_blocks) if b not in changed]
            assert same(state[rest], layer.checkpoint[rest]), "the commit changed a block of no row"
            assert same(page[rest], pages.pages[rest]), "the commit changed a page of no row"
        for block, (state, page) in self.cached.items():
            assert same(state, self.layers[0].checkpoint[block]), "a cached block was written"
            assert same(page, self.pages[0].pages[block, :, : WIDTH - 1]), "a cached block's history was written"

    def keep(self, index, kept) -> set[int]:
        """The request is `kept` tokens further; check its state, and the boundary it crossed. The blocks written."""
        request = self.requests[index]
        written, start = set(), request.computed
        request.computed += kept
        if not self.align:
            written.add(self.blocks[index][0])
        elif kept:
            request.column = (request.computed - 1) // self.align
            boundary = (start // self.align + 1) * self.align
            if request.computed >= boundary:
                column = boundary // self.align - 1
                self.check(index, column, boundary)
                block = self.blocks[index][column]
                self.cached[block] = (
                    self.layers[0].checkpoint[block].clone(),
                    self.pages[0].pages[block, :, : WIDTH - 1].clone(),
                )
                written.add(block)
            written.add(self.blocks[index][request.column])
        else:
            request.column = (request.computed - 1) // self.align  # vLLM goes back to the last kept token's block
        self.check(index, request.column, request.computed)
        return written if kept else set()

    def check(self, index, column, count) -> None:
        block, request = self.blocks[index][column], self.requests[index]
        for i, (layer, pages) in enumerate(zip(self.layers, self.pages, strict=True)):
            close(layer.checkpoint[block], request.state(i, count), self.error)
            assert torch.equal(pages.pages[block, :, : WIDTH - 1], request.history(i, count)), "wrong history"


def same(a, b) -> bool:
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


def close(a, b, rtol) -> None:
    """Relative Frobenius error at most `rtol`; NaN fails."""
    error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
    assert error <= rtol, f"relative error {error:.2e} above {rtol:.0e}"
