"""Prefill: a whole prompt through KDA, chunk by chunk, writing the state itself instead of records.

Inside a chunk of C tokens, with rows P_t = e^{G_t} k^_t and Q_t = e^{G_t} q^_t and decays between tokens e^{G_t - G_i}
<= 1,

    (I + M) U = Diag(beta) (V - P S^T)     M_ti = beta_t sum_c k^_tc k^_ic e^{G_tc - G_ic}   for i < t
    O = Q S^T + D U                        D_ti = sum_c q^_tc k^_ic e^{G_tc - G_ic}          for i <= t
    S <- S Diag(e^{G_C}) + U^T (k^_i e^{G_C - G_i})_i

which is the recurrence solved for all corrections of the chunk at once. The decays are formed pairwise, never as
e^{-G}, so no gate overflows. A token past a row's length gets g = 0 and beta = 0: it decays nothing and adds nothing,
so each row ends in the state of its own length.
Source: Kimi Linear, arXiv:2510.26692, section 3.2 (chunkwise form).

Read `kda_scan` of `dspark.kernels.kda` first: it is the definition.
"""

import torch

from dspark.kernels.kda import Gate, Tokens, compute_dtype, prepare

CHUNK = 16  # the pairwise decays of a chunk take CHUNK^2 K numbers a head


def kda_prefill(
    tokens: Tokens, gate: Gate, state: torch.Tensor, num_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of prompts and the state after each.

    Args:
        tokens: [B, T, ...]; tokens past a row's length may hold anything, NaN too.
        gate: the layer's gate.
        state: [B, H, V, K] to start from; not changed.
        num_rows: [B] int64, length of each row, 0..T.

    Returns:
        Outputs [B, T, H, V] in the dtype of `tokens.value`, zero past a row's length; states [B, H, V, K] in float32 or
        float64 after `num_rows` tokens.

    Source: `kda_scan`.
    """
    dtype = compute_dtype(state, tokens.key)
    num_tokens = tokens.key.shape[1]
    inside = (torch.arange(num_tokens, device=num_rows.device) < num_rows[:, None])[..., None]
    query, key, value, log_decay, beta = (
        torch.where(inside if x.ndim == 3 else inside[..., None], x, 0).transpose(1, 2)  # [B, H, T, ...]
        for x in prepare(tokens, gate, dtype)
    )
    state, outputs = state.to(dtype), []
    for start in range(0, num_tokens, CHUNK):
        chunk = slice(start, start + CHUNK)
        out, state = _chunk(*(x[:, :, chunk] for x in (query, key, value, log_decay, beta)), state)
        outputs.append(out)
    return torch.cat(outputs, 2).transpose(1, 2).to(tokens.value.dtype), state


def _chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, C, V] and next state of one chunk; the inputs are prepared, [B, H, C, ...]."""
    count = key.shape[2]
    total = log_decay.cumsum(2)
    between = (total[:, :, :, None] - total[:, :, None]).clamp_max(0).exp() * key[:, :, None]  # [B, H, t, i, K]
    couplings = (between * key[:, :, :, None]).sum(-1).tril(-1) * beta[..., None]
    reads = (between * query[:, :, :, None]).sum(-1).tril()
    decayed = total.exp()
    surplus = beta[..., None] * (value - (decayed * key) @ state.transpose(2, 3))
    identity = torch.eye(count, dtype=key.dtype, device=key.device)
    correction = torch.linalg.solve_triangular(identity + couplings, surplus, upper=False, unitriangular=True)
    outputs = (decayed * query) @ state.transpose(2, 3) + reads @ correction
    return outputs, state * decayed[:, :, -1:] + correction.transpose(2, 3) @ between[:, :, -1]
