"""Random KDA layers and the oracle that every path is compared with: the recurrence, one token at a time."""

import torch

from dspark.kernels.kda import Gate, KDALayer, Records, Rows, Tokens, kda_scan

SOFTPLUS, BOUNDED = None, -5.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL_ERROR = 2e-5 if DEVICE == "cuda" else 3e-6  # split products on a device, float32 ones in the interpreter


def draw(*shape, seed=0, dtype=torch.float32):
    """The same normal numbers on every device and in every dtype."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return numbers.to(DEVICE, dtype)


def random_gate(heads, key_dim, lower_bound=BOUNDED, *, seed=0, dtype=torch.float64, with_rate=True) -> Gate:
    """Rates from slow to saturated, as trained layers have them."""
    a_log = torch.linspace(-2.5, 1.0, heads, dtype=dtype, device=DEVICE) if with_rate else None
    return Gate(a_log, 2 * draw(heads, key_dim, seed=seed, dtype=dtype), lower_bound)


def random_tokens(batch, num_tokens, heads, key_dim, value_dim, *, seed=0, dtype=torch.float64) -> Tokens:
    widths = (key_dim, key_dim, value_dim, key_dim, 1)
    numbers = draw(batch, num_tokens, heads, sum(widths), seed=seed, dtype=dtype)
    *rest, beta = (part.contiguous() for part in numbers.split(widths, dim=-1))
    return Tokens(*rest, beta[..., 0])


def random_layer(
    slots,
    heads,
    key_dim,
    value_dim,
    capacity,
    *,
    lower_bound=BOUNDED,
    seed=0,
    dtype=torch.float64,
    state_dtype=None,
    with_rate=True,
) -> KDALayer:
    """Random checkpoints, records full of NaN: reading one that was never written shows."""
    state = draw(slots, heads, value_dim, key_dim, seed=seed + 1, dtype=state_dtype or dtype)
    records = Records.empty(slots, capacity, state, dtype)
    for store in (records.correction, records.key, records.gate):
        store.fill_(float("nan"))
    gate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return KDALayer(
        state, records, random_gate(heads, key_dim, lower_bound, seed=seed, dtype=gate_dtype, with_rate=with_rate)
    )


def cut(tokens: Tokens, row, start, stop) -> Tokens:
    """Tokens start..stop-1 of one row."""
    return Tokens(
        *(getattr(tokens, name)[row : row + 1, start:stop] for name in ("query", "key", "value", "gate", "beta"))
    )


def pad(pieces, num_tokens) -> Tokens:
    """A batch of one-row token runs of different lengths; what lies past a run's end is NaN."""

    def field(name):
        rows = [getattr(piece, name) for piece in pieces]
        out = rows[0].new_full((len(rows), num_tokens, *rows[0].shape[2:]), float("nan"))
        for row, values in enumerate(rows):
            out[row, : values.shape[1]] = values[0]
        return out

    return Tokens(*(field(name) for name in ("query", "key", "value", "gate", "beta")))


def plain(tokens: Tokens, gate, state, count):
    """Outputs and state after the first `count` tokens, one at a time."""
    outputs = []
    for t in range(count):
        out, _, states = kda_scan(Tokens(*(x[:, t : t + 1] for x in vars(tokens).values())), gate, state)
        state = states[:, 0]
        outputs.append(out)
    return outputs, state


def line_up(tensor, num_rows, order, gap=2):
    """Runs of a padded [B, T, ...] on a line [1, N, ...], in `order`, with NaN before and behind each run; where each
    starts."""
    pieces, starts, length = [], [0] * len(num_rows), 0
    for row in order:
        pieces += [tensor.new_full((gap, *tensor.shape[2:]), float("nan")), tensor[row, : num_rows[row]]]
        starts[row] = length + gap
        length += gap + num_rows[row]
    pieces.append(tensor.new_full((gap, *tensor.shape[2:]), float("nan")))
    return torch.cat(pieces)[None], torch.tensor(starts)


def close(a, b, rtol):
    """Relative Frobenius error at most `rtol`; NaN fails."""
    error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
    assert error <= rtol, f"relative error {error:.2e} above {rtol:.0e}"


def ring(slots, num_rows, held=None, start=0, fold=False):
    slots, num_rows = torch.tensor(slots), torch.tensor(num_rows)
    held = torch.zeros_like(slots) if held is None else torch.tensor(held)
    fold = torch.tensor(fold) if isinstance(fold, list) else torch.full_like(slots, fold, dtype=torch.bool)
    return Rows(slots, slots, num_rows, torch.full_like(slots, start), held, fold)


def filled(layer, rows):
    """Held records get values; all others stay NaN."""
    for slot, first, held in zip(rows.record_slots.tolist(), rows.start.tolist(), rows.held.tolist(), strict=True):
        index = [(first + i) % layer.records.capacity for i in range(held)]
        for seed, store in enumerate(vars(layer.records).values(), 9 * slot):
            store[slot, :, index] = draw(store.shape[1], held, store.shape[3], seed=seed, dtype=store.dtype)
    return layer


def copied(layer):
    return KDALayer(layer.checkpoint.clone(), Records(*(x.clone() for x in vars(layer.records).values())), layer.gate)


def poisoned(tokens, num_rows):
    """NaN wherever no row has a token."""
    outside = torch.arange(tokens.key.shape[1]) >= torch.tensor(num_rows)[:, None]
    return Tokens(
        *(
            x.clone().masked_fill_(outside.view(*outside.shape, *[1] * (x.ndim - 2)), float("nan"))
            for x in vars(tokens).values()
        )
    )
