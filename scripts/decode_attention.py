"""Attention of one new token per row over a cache in which every row has its own length, and the write of its key and
value.

    cache[b, h, pos_b] = (k, v)
    out = softmax(scale * q . K[b, h, 0..pos_b]) V[b, h, 0..pos_b]      for the query heads of kv head h

One program owns one (row, kv head): it reads that cache once for the whole group, so a step moves each cached byte
once, and the new key never has to be read back. Rows may stand at any position, which is what lets data generation hand
a finished row its next document at once. The tensor product is padded from `group` to 16 rows, the smallest that the
matrix units take.
"""

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # the reference below is then the only path
    triton = None

MIN_QUERY_ROWS = 16
# (cache rows per iteration, warps, pipeline stages); `fastest_setting` times them on the machine at hand.
SETTINGS = ((64, 4, 3), (64, 2, 3), (128, 4, 3), (32, 2, 4))


def decode_attention_ref(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
) -> torch.Tensor:
    """Write and attend, in plain torch.

    Args:
        queries: [B, heads, d], rotated; heads of one group are neighbours.
        keys: [B, kv heads, d] of the new token, rotated.
        values: [B, kv heads, d] of the new token.
        caches: keys and values, [B, kv heads, T, d] each, changed at `positions`.
        positions: [B] integer, position of the new token, below T.

    Returns:
        [B, heads * d].
    """
    key_cache, value_cache = caches
    batch_size, kv_heads, num_slots, head_dim = key_cache.shape
    rows = torch.arange(batch_size, device=positions.device)
    key_cache[rows, :, positions.long()] = keys
    value_cache[rows, :, positions.long()] = values
    visible = torch.arange(num_slots, device=positions.device) <= positions[:, None]
    grouped = queries.view(batch_size, kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(grouped, key_cache, value_cache, visible[:, None, None]).flatten(1)


if triton is not None:

    @triton.jit
    def _decode_attention_kernel(  # noqa: PLR0913 - pointers, sizes and block shapes
        queries, keys, values, key_cache, value_cache, positions, out,
        scale, num_slots,
        KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        pair = tl.program_id(0).to(
            tl.int64
        )  # row * KV_HEADS + kv head: also the row of every [B, kv heads, ...] tensor
        position = tl.load(positions + pair // KV_HEADS)
        head, dim = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
        cell = (pair * GROUP + head[:, None]) * HEAD_DIM + dim[None, :]
        q = tl.load(queries + cell, mask=head[:, None] < GROUP, other=0.0)
        new_key = tl.load(keys + pair * HEAD_DIM + dim)
        new_value = tl.load(values + pair * HEAD_DIM + dim)
        base = pair * num_slots * HEAD_DIM
        tl.store(key_cache + base + position * HEAD_DIM + dim, new_key)
        tl.store(value_cache + base + position * HEAD_DIM + dim, new_value)

        # The running softmax starts from the new token; the loop reads older slots only, never the ones just written.
        top = tl.sum(q.to(tl.float32) * new_key[None, :].to(tl.float32), axis=1) * scale
        total = tl.full([ROWS], 1.0, tl.float32)
        mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32) + new_value[None, :].to(tl.float32)
        for start in range(0, position, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            where = base + slot[:, None] * HEAD_DIM + dim[None, :]
            k = tl.load(key_cache + where, mask=slot[:, None] < position, other=0.0)
            v = tl.load(value_cache + where, mask=slot[:, None] < position, other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            scores = tl.where(slot[None, :] < position, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            kept, weights = tl.exp(top - new_top), tl.exp(scores - new_top[:, None])
            total = total * kept + tl.sum(weights, axis=1)
            mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v)
            top = new_top
        tl.store(out + cell, (mixed / total[:, None]).to(out.dtype.element_ty), mask=head[:, None] < GROUP)


def decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    setting: tuple[int, int, int] = SETTINGS[0],
) -> torch.Tensor:
    """`decode_attention_ref` in one Triton launch; all tensors contiguous, `positions` int32, d a power of two of at
    least 16.
    """
    batch_size, kv_heads, num_slots, head_dim = caches[0].shape
    out = torch.empty_like(queries)
    block, warps, stages = setting
    _decode_attention_kernel[(batch_size * kv_heads,)](
        queries, keys, values, *caches, positions, out, head_dim**-0.5, num_slots,
        KV_HEADS=kv_heads, GROUP=queries.shape[1] // kv_heads, HEAD_DIM=head_dim, ROWS=MIN_QUERY_ROWS, BLOCK=block,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.flatten(1)


def fastest_setting(caches: tuple[torch.Tensor, torch.Tensor], heads: int) -> tuple[tuple[int, int, int], str]:
    """Time every setting on a CUDA device with half-full caches of random content, against the reference's output.

    Returns:
        the fastest setting, and one line for the log with each one's milliseconds and cache bandwidth.

    Raises:
        ValueError: a setting disagrees with the reference by more than rounding.
    """
    keys, values = caches
    batch_size, kv_heads, num_slots, head_dim = keys.shape
    rows = [
        torch.randn(batch_size, count, head_dim, device=keys.device).to(keys.dtype)
        for count in (heads, kv_heads, kv_heads)
    ]
    positions = torch.full((batch_size,), num_slots // 2, dtype=torch.int32, device=keys.device)
    keys.normal_()
    values.normal_()
    moved = 2 * batch_size * kv_heads * (num_slots // 2) * head_dim * keys.element_size()
    sample = tuple(cache[:32].clone() for cache in caches)
    expected = decode_attention_ref(*(row[:32] for row in rows), sample, positions[:32]).float()
    timings = {}
    for setting in SETTINGS:
        error = (decode_attention(*rows, caches, positions, setting)[:32].float() - expected).norm() / expected.norm()
        if not error < 0.02:
            raise ValueError(
                f"decode_attention {setting} differs from its reference by {error:.3g}; use --attention torch"
            )
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            decode_attention(*rows, caches, positions, setting)
        end.record()
        torch.cuda.synchronize()
        timings[setting] = begin.elapsed_time(end) / 10
    shown = ", ".join(f"{setting} {ms:.3f} ms {moved / ms / 1e9:.2f} TB/s" for setting, ms in timings.items())
    return min(timings, key=timings.__getitem__), shown
