"""Kimi Delta Attention: the recurrence, its two gate forms, and what the kernels of this folder share.

Per head, with a state S [V, K] and for each token

    q^ = q / sqrt(sum q^2 + 1e-6) / sqrt(K)      k^ = k / sqrt(sum k^2 + 1e-6)
    S  <- S Diag(e^g)                            g [K], g <= 0, the log decay
    u  = beta (v - S k^)                         the correction
    S  <- S + u k^^T
    o  = S q^                                    reads the state after the update

Unrolled, with G_t = g_1 + .. + g_t, the state after a tokens is

    S_a = S_0 Diag(e^{G_a}) + sum_{j <= a} u_j (k^_j e^{G_a - G_j})^T

in which every exponential is at most 1, and u_j depends on tokens up to j only. So (u, k, g) of the tokens since S_0
are enough to rebuild the state after any accepted prefix, whatever was rejected behind it: that is ReplaySSM. Keys and
gates are recorded raw, as the layer produced them, because that costs half the bytes and loses nothing; u is recorded
in the state's own precision.
Source: Kimi Linear, arXiv:2510.26692, section 3.

Read `kda_scan` first: it is the definition that everything else is compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dspark.kernels import HAS_TRITON

NORM_EPS = 1e-6
SOFTPLUS_LINEAR_ABOVE = 20.0


@dataclass(frozen=True)
class Gate:
    """How a raw gate becomes a log decay.

    Without `lower_bound`: g = -e^a_log softplus(raw + dt_bias), unbounded.
    With it: g = lower_bound * sigmoid(e^a_log (raw + dt_bias)).

    Attributes:
        a_log: [H], log of the decay rate of each head; None is a rate of 1.
        dt_bias: [H, K].
        lower_bound: the most negative log decay, or None for the softplus form.

    Raises:
        ValueError: a shape does not fit, or the bound is not negative.
    """

    a_log: torch.Tensor | None
    dt_bias: torch.Tensor
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        if self.dt_bias.ndim != 2:
            raise ValueError(f"dt_bias must be [heads, key dim], got {tuple(self.dt_bias.shape)}; reshape a flat bias")
        if self.a_log is not None and self.a_log.shape != self.dt_bias.shape[:1]:
            raise ValueError(
                f"a_log must be [{self.dt_bias.shape[0]}], one per head of dt_bias, got {tuple(self.a_log.shape)}"
            )
        if self.lower_bound is not None and not self.lower_bound < 0:
            raise ValueError(
                f"lower_bound={self.lower_bound} must be negative (Kimi K3 has -5): a log decay above 0 would let the "
                f"state grow without limit"
            )

    def log_decay(self, raw: torch.Tensor) -> torch.Tensor:
        """g of a raw gate [..., H, K], in float32 (float64 for float64 input); values <= 0."""
        shifted = raw.to(compute_dtype(raw)) + self.dt_bias.to(compute_dtype(raw))
        rate = 1.0 if self.a_log is None else self.a_log.to(shifted.dtype).exp()[:, None]
        if self.lower_bound is None:
            return -rate * F.softplus(shifted, threshold=SOFTPLUS_LINEAR_ABOVE)
        return self.lower_bound * torch.sigmoid(rate * shifted)


@dataclass(frozen=True)
class Tokens:
    """What a KDA layer computes from its input for T tokens of B rows, after the short convolution.

    `query`, `key`, `gate` (raw): [B, T, H, K]; `value`: [B, T, H, V]; `beta` (raw, before the sigmoid): [B, T, H].
    Packed (see `Rows.first_token`): one line of N tokens, [1, N, ...], in which every row has its own run.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class Records:
    """Inputs of recent tokens, a ring of R rows for each of N slots.

    `correction` (u): [N, H, R, V], float32 beside a float32 state; `key`, `gate` (both raw): [N, H, R, K] in the
    activations' dtype. A token has the same ring row in all three. With K = V = 128 that is 1,024 bytes a token and
    head, or 768 with a bfloat16 correction.
    """

    correction: torch.Tensor
    key: torch.Tensor
    gate: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, capacity: int, state: torch.Tensor, dtype: torch.dtype) -> "Records":
        """Uninitialised records for states like `state` [*, H, V, K] and activations of `dtype`."""
        _, heads, value_dim, key_dim = state.shape
        allocate = [(value_dim, state.dtype), (key_dim, dtype), (key_dim, dtype)]
        return cls(
            *(torch.empty(num_slots, heads, capacity, dim, dtype=kind, device=state.device) for dim, kind in allocate)
        )

    @property
    def capacity(self) -> int:
        return self.correction.shape[2]


@dataclass(frozen=True)
class KDALayer:
    """One layer: `checkpoint` [N, H, V, K] (float64, float32 or bfloat16), its `records` and its `gate`."""

    checkpoint: torch.Tensor
    records: Records
    gate: Gate


@dataclass(frozen=True)
class Window:
    """The short convolution of a layer, where verification does it too; arguments of `conv_window` of these names.

    Channels C = H (2 K + V) are those of all queries, then all keys, then all values.

    Attributes:
        weight: [C, W].
        ring: [N, R, C], inputs of recent tokens by slot of the state, contiguous within a slot.
        cursor: [B] int64, ring row of each row's first token; None: W - 1, so that a ring begins with the history.
        spare: [B, C] of the ring's dtype, used without a cursor only: ring row R of each row of the batch, for rings
            that are one row too short for the longest step.
    """

    weight: torch.Tensor
    ring: torch.Tensor
    cursor: torch.Tensor | None
    spare: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.cursor is None) == (self.spare is not None), "a window has a cursor, or spare rows"


@dataclass(frozen=True)
class Rows:
    """Where the rows of a batch have their state; made once a step and used by every layer.

    All are [B] int64 on the device, `fold` bool.

    Attributes:
        slots: slot of the checkpoint; a negative slot is a padding row, for which nothing is read or written.
        record_slots: slot of the records; the same numbers unless the engine keeps records apart from states.
        num_rows: tokens of the row that count, 0..T; 0 makes it a padding row.
        start: ring row of the oldest record that is not in the checkpoint.
        held: accepted records not yet in the checkpoint; the next token is recorded at ring row start + held.
        fold: whether this step's verification writes the held records into the checkpoint.
        first_token: None where tokens are [B, T, ...]. Else they are packed [1, N, ...] and the row's tokens start at
            this index; runs of rows must not overlap, and tokens between them belong to no row.
        max_held: the most records that a row which does not fold may hold, a number known without asking the device;
            None: as many as the ring has room for.
    """

    slots: torch.Tensor
    record_slots: torch.Tensor
    num_rows: torch.Tensor
    start: torch.Tensor
    held: torch.Tensor
    fold: torch.Tensor
    first_token: torch.Tensor | None = None
    max_held: int | None = None

    @classmethod
    def current(
        cls,
        slots: torch.Tensor,
        num_rows: torch.Tensor,
        *,
        record_slots: torch.Tensor | None = None,
        null_slot: int = -1,
        first_token: torch.Tensor | None = None,
    ) -> "Rows":
        """Rows whose checkpoint is up to date, as it always is when every step is followed by `kda_commit`.

        Slots up to `null_slot` count as padding: engines point padded rows at a block that nobody reads (vLLM: 0).
        """
        slots = torch.where(slots > null_slot, slots, -1)
        zero = torch.zeros_like(slots)
        records = slots if record_slots is None else record_slots
        return cls(slots, records, num_rows, zero, zero, zero.bool(), first_token, 0)


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """float64 if any tensor has it, else float32: nothing is computed in half precision."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def runs_kernel(x: torch.Tensor) -> bool:
    """Whether an operation on `x` launches its kernel; float64 does not, since kernels compute in float32."""
    return HAS_TRITON and x.is_cuda and x.dtype != torch.float64


def unit(x: torch.Tensor) -> torch.Tensor:
    """x over its length along the last axis; the constant stands inside the root, so that a zero vector stays zero."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def prepare(tokens: Tokens, gate: Gate, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q^, k^, v, g and beta of the recurrence, in `dtype`."""
    query, key = unit(tokens.query.to(dtype)), unit(tokens.key.to(dtype))
    return (
        query * tokens.query.shape[-1] ** -0.5,
        key,
        tokens.value.to(dtype),
        gate.log_decay(tokens.gate.to(dtype)),
        torch.sigmoid(tokens.beta.to(dtype)),
    )


def kda_scan(tokens: Tokens, gate: Gate, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The recurrence, token by token.

    Args:
        tokens: T tokens of B rows.
        gate: the layer's gate.
        state: [B, H, V, K]; not changed.

    Returns:
        Outputs [B, T, H, V], corrections u [B, T, H, V] and the states after each token [B, T, H, V, K], in float32 or
        float64.

    Source: Kimi Linear, arXiv:2510.26692, equation 1.
    """
    dtype = compute_dtype(state, tokens.key)
    query, key, value, log_decay, beta = prepare(tokens, gate, dtype)
    state, outputs, corrections, states = state.to(dtype), [], [], []
    for t in range(key.shape[1]):
        state = state * log_decay[:, t, :, None, :].exp()
        correction = beta[:, t, :, None] * (value[:, t] - (state * key[:, t, :, None, :]).sum(-1))
        state = state + correction[..., None] * key[:, t, :, None, :]
        outputs.append((state * query[:, t, :, None, :]).sum(-1))
        corrections.append(correction)
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(corrections, 1), torch.stack(states, 1)


def replay(state: torch.Tensor, correction: torch.Tensor, key: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """S_a of the closed form: `state` [B, H, V, K] after the records correction [B, H, R, V], key and log_decay [B, H,
    R, K].

    A record that must not count has all three zero: it then decays nothing and adds nothing.
    """
    after = (
        F.pad(log_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)
    )  # G_a - G_j summed, not subtracted: |G| reaches 45, and its rounding would show
    return state * log_decay.sum(2, keepdim=True).exp() + correction.transpose(2, 3) @ (after.exp() * unit(key))


def ring_rows(start: torch.Tensor, count: int, capacity: int) -> torch.Tensor:
    """[B, count] ring rows of `count` consecutive records from `start` [B]."""
    return (start[:, None] + torch.arange(count, device=start.device)) % capacity


def runs(first_token: torch.Tensor, num_rows: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens of rows lie on a packed line of `length` tokens: index [B, T] and which of it counts, T being
    the longest run. Places that don't count are 0."""
    window = torch.arange(int(num_rows.max()) if len(num_rows) else 0, device=num_rows.device)
    inside = window < num_rows[:, None]
    index = torch.where(inside, first_token[:, None] + window, 0)
    assert not inside.any() or int(index.max()) < length, f"a row's tokens end past the line of {length}"
    return index, inside


class LayerTable:
    """Layers that one launch serves: checked once, with the distance of each from the first.

    `offsets`: [L, 6] int64 on the layers' device, in elements: checkpoint, correction, key, gate, a_log, dt_bias.
    `aligned`: whether the first four are multiples of 16, as those of separate allocations are.
    """

    def __init__(self, layers: Sequence[KDALayer]) -> None:
        """Take at least one layer.

        Raises:
            ValueError: the layers differ in shape, stride, dtype, device or gate form, or their storage is not
            contiguous
                within a slot.
        """
        self.layers = tuple(layers)
        tensors = [_layer_tensors(layer) for layer in self.layers]
        for index, (layer, row) in enumerate(zip(self.layers, tensors, strict=True)):
            form = [(t.shape, t.stride(), t.dtype, t.device) for t in row] + [layer.gate.lower_bound]
            if index == 0:
                expected = form
            elif form != expected:
                raise ValueError(
                    f"layer {index} differs from layer 0 in shape, stride, dtype, device or gate form, so that one "
                    f"launch "
                    "cannot serve both; give each kind of layer its own call"
                )
            for name, tensor in (("checkpoint", row[0]), ("correction", row[1]), ("key", row[2]), ("gate", row[3])):
                if tensor.numel() and not tensor[0].is_contiguous():
                    raise ValueError(
                        f"layer {index}: {name} must be contiguous within a slot, got strides {tensor.stride()}; "
                        "only the distance between slots may be padded"
                    )
        distances = [
            [(t.data_ptr() - base.data_ptr()) // t.element_size() for t, base in zip(row, tensors[0], strict=True)]
            for row in tensors
        ]
        self.aligned = all(distance % 16 == 0 for row in distances for distance in row[:4])
        self.offsets = torch.tensor(distances, dtype=torch.int64, device=self.layers[0].checkpoint.device)


def _layer_tensors(layer: KDALayer) -> tuple[torch.Tensor, ...]:
    gate, records = layer.gate, layer.records
    rate = gate.dt_bias if gate.a_log is None else gate.a_log
    return layer.checkpoint, records.correction, records.key, records.gate, rate, gate.dt_bias
