"""The differentiable side of a drafter: blocks at chosen anchors, attention over their context, and the loss over the
vocabulary.

For an anchor at position s of a sequence, rows k = 0..B-1 of its block carry [anchor, mask, ...], stand at positions s
+ k, see the context features of positions 0..s-1 and their own block, and predict the token at s + 1 + k. With p the
target's distribution there and q the drafter's, Markov bias of the true previous token included,

    loss = sum_rows w (0.1 CE(q, token) + 0.9 TV(p, q) + c BCE(confidence, 1 - TV)) / sum_rows w,     w = exp(-k / 4),
    TV = sum |p - q| / 2.

1 - TV is the probability that rejection sampling keeps the draft. A row counts only if all labels of its block up to
its own are part of the answer that the anchor is in: no block crosses into another turn or document. Sequences lie end
to end in one list of M rows, blocks in one list of R rows, so every shape is the same whatever the length of the
sequences. The layers are those of `dspark.drafter.Drafter`, called with an attention over many blocks at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dspark.drafter import Drafter

CE_SHARE = 0.1
DECAY_ROWS = 4.0
CONFIDENCE_WEIGHT = 0.25
TILE = 128  # of the sparse attention mask
NUM_CHUNKS = 4  # of the vocabulary loss: one chunk's logits are in memory at a time


@dataclass(frozen=True)
class Blocks:
    """Blocks of N sequences of length L, A anchors each; R = N * A * B rows in order of sequence, anchor, row.

    Attributes:
        positions: [N, A] int64, position of the anchor in its sequence, ascending.
        inputs: [R] int64, anchor or mask token.
        previous: [R] token before the label, the true one.
        labels: [R] token that the row predicts.
        target_rows: [R] row of the flat [N * L] list whose target hidden state predicts the label.
        valid: [R] bool, whether the row counts.
    """

    positions: torch.Tensor
    inputs: torch.Tensor
    previous: torch.Tensor
    labels: torch.Tensor
    target_rows: torch.Tensor
    valid: torch.Tensor


def choose_anchors(
    answer: torch.Tensor, num_anchors: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw anchors without replacement among answer tokens whose successor is an answer token too.

    Args:
        answer: [N, L] bool.
        num_anchors: A, for each sequence.
        generator: of the tensors' device.

    Returns:
        positions [N, A], ascending, and whether each is an anchor at all ([N, A] bool: a short answer has fewer).
    """
    possible = answer & answer.roll(-1, dims=1)
    possible[:, -1] = False
    lottery = torch.rand(answer.shape, generator=generator, device=answer.device).masked_fill_(~possible, -1.0)
    positions = lottery.topk(num_anchors, dim=1).indices.sort(dim=1).values
    return positions, possible.gather(1, positions)


def make_blocks(
    tokens: torch.Tensor,
    answer: torch.Tensor,
    anchors: tuple[torch.Tensor, torch.Tensor],
    block_size: int,
    mask_id: int,
) -> Blocks:
    """Lay out the blocks of `choose_anchors` over tokens [N, L] with answer mask [N, L]."""
    positions, possible = anchors
    num_sequences, length = tokens.shape
    offsets = torch.arange(block_size, device=tokens.device)
    before = positions[:, :, None] + offsets  # [N, A, B]: position of the token before the label
    inside = before + 1 < length
    before = before.clamp_max(length - 2)
    rows = before + length * torch.arange(num_sequences, device=tokens.device)[:, None, None]
    in_answer = answer.flatten()[rows + 1] & inside & possible[:, :, None]
    previous = tokens.flatten()[rows]
    inputs = previous.masked_fill(offsets > 0, mask_id)
    return Blocks(
        positions=positions,
        inputs=inputs.flatten(),
        previous=previous.flatten(),
        labels=tokens.flatten()[rows + 1].flatten(),
        target_rows=rows.flatten(),
        valid=in_answer.int().cummin(dim=-1).values.bool().flatten(),
    )


Attend = Callable[..., torch.Tensor]


def dense_attention(
    queries: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> torch.Tensor:
    """Attention of block rows, one dense mask for each sequence; right anywhere, and fast only for tiny inputs.

    Args:
        queries: [1, R, heads, d].
        context: keys and values of the context, [1, N * L, kv heads, d] each.
        own: keys and values of the block rows, [1, R, kv heads, d] each.
        mask: [N, 1, R / N, L + R / N] bool of `dense_mask`.

    Returns:
        [1, R, heads * d].
    """
    num_sequences = mask.shape[0]
    keys, values = (
        torch.cat([old.view(num_sequences, -1, *old.shape[2:]), new.view(num_sequences, -1, *new.shape[2:])], dim=1)
        .transpose(1, 2)
        .repeat_interleave(queries.shape[2] // old.shape[2], dim=1)
        for old, new in zip(context, own, strict=True)
    )
    split = queries.view(num_sequences, -1, *queries.shape[2:]).transpose(1, 2)
    attended = F.scaled_dot_product_attention(split, keys, values, attn_mask=mask)
    return attended.transpose(1, 2).reshape(1, queries.shape[1], -1)


def dense_mask(blocks: Blocks, length: int, block_size: int) -> torch.Tensor:
    """[N, 1, A * B, L + A * B] bool: context before the anchor, and the row's own block."""
    num_sequences, num_anchors = blocks.positions.shape
    visible = torch.arange(length, device=blocks.positions.device) < blocks.positions[:, :, None]
    own = torch.eye(num_anchors, dtype=torch.bool, device=visible.device).repeat_interleave(block_size, dim=1)
    mask = torch.cat([visible, own.expand(num_sequences, -1, -1)], dim=-1)
    return mask.repeat_interleave(block_size, dim=1)[:, None]


def sparse_attention(
    queries: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    mask: BlockMask,
) -> torch.Tensor:
    """`dense_attention` in one launch over all sequences, which skips the tiles that `SparseMask` leaves out."""
    keys, values = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(context, own, strict=True))
    attended: Any = flex_attention(queries.transpose(1, 2), keys, values, block_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2).flatten(2)


class SparseMask:
    """Builds flex_attention's mask over keys [context rows 0..M-1, block rows M..M+R-1] from sorted anchors, without
    ever forming the [R, M + R] mask.

    A block sees the interval [start of its sequence, its anchor) of the context rows; a tile of TILE keys is visited if
    the interval of any block of the query tile touches it. The two bounds live in fixed tensors: the mask function is
    then one object for all steps, and compiled code that holds it is compiled once.
    """

    def __init__(self, num_context: int, num_rows: int, block_size: int, device: torch.device) -> None:
        """Sizes: M context rows, R block rows.

        Raises:
            ValueError: M, R and the block size do not fit the tiles.
        """
        if num_context % TILE or num_rows % TILE or TILE % block_size:
            raise ValueError(
                f"{num_context} tokens and {num_rows} block rows a batch with blocks of {block_size}: the sparse "
                f"attention needs multiples of {TILE}. Change "
                "--batch-tokens, or use --attention dense"
            )
        self.num_context, self.num_rows, self.block_size = num_context, num_rows, block_size
        low = self.low = torch.zeros(num_rows // block_size, dtype=torch.int32, device=device)
        high = self.high = torch.zeros_like(low)
        first_own_block = num_context // block_size

        def visible(_batch: Any, _head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            block = row // block_size
            return ((key >= low[block]) & (key < high[block])) | (key // block_size == block + first_own_block)

        self.visible = visible

    def build(self, blocks: Blocks, length: int) -> BlockMask:
        """The mask for one batch; valid until the next call."""
        starts = length * torch.arange(blocks.positions.shape[0], device=self.low.device)
        self.low.copy_(starts[:, None].expand_as(blocks.positions).flatten())
        self.high.copy_((starts[:, None] + blocks.positions).flatten())
        edges = torch.arange(0, self.num_context, TILE, device=self.low.device)
        low, high = (bound.view(-1, TILE // self.block_size, 1) for bound in (self.low, self.high))
        touched = ((low < edges + TILE) & (high > edges) & (low < high)).any(dim=1)
        whole = ((low <= edges) & (high >= edges + TILE)).all(dim=1)
        own = torch.eye(touched.shape[0], dtype=torch.bool, device=self.low.device)
        partial = torch.cat([touched & ~whole, own], dim=1)
        whole = torch.cat([whole, torch.zeros_like(own)], dim=1)
        return BlockMask.from_kv_blocks(
            *_ordered(partial),
            *_ordered(whole),
            BLOCK_SIZE=TILE,
            mask_mod=self.visible,
            seq_lengths=(self.num_rows, self.num_context + self.num_rows),
        )


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[query tiles, key tiles] bool -> number of True and their indices first, in the layout of BlockMask."""
    counts, indices = tiles.sum(dim=1), tiles.int().argsort(dim=1, descending=True, stable=True)
    return counts.int()[None, None].contiguous(), indices.int()[None, None].contiguous()


def block_hidden(
    drafter: Drafter,
    taps: torch.Tensor,
    embedded: torch.Tensor,
    context_tables: tuple[torch.Tensor, torch.Tensor],
    block_tables: tuple[torch.Tensor, torch.Tensor],
    attend: Attend,
    mask: Any,
) -> torch.Tensor:
    """Backbone over all blocks of a batch.

    Args:
        drafter: its layers are used; its cache and sampling are not.
        taps: [1, M, num_taps * target hidden].
        embedded: [1, R, hidden], embeddings of the blocks' input tokens.
        context_tables: RoPE of the M context rows.
        block_tables: RoPE of the R block rows.
        attend: `dense_attention` or `sparse_attention`.
        mask: the mask that goes with it.

    Returns:
        [R, hidden] after the final norm.
    """
    features, x = drafter.context_features(taps), embedded
    layers: Any = drafter.layers
    for layer in layers:
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        context = attention.keys_values(features, *context_tables)
        own = attention.keys_values(normed, *block_tables)
        x = x + attention.o_proj(attend(attention.queries(normed, *block_tables), context, own, mask))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return drafter.norm(x)[0]


def row_gradients(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of every row and its gradient by the draft logits, in closed form.

    With s = sign(q - p) / 2:   d CE / d z = q - onehot(label),   d TV / d z = q (s - sum_v q s).

    Args:
        target_logits: [C, V].
        draft_logits: [C, V].
        labels: [C].
        weights: [C] float, factor of each row in the total loss.

    Returns:
        gradient [C, V] in the dtype of the logits, TV [C] and CE [C] (without the weights) in at least float32.
    """
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    target, draft = target_logits.to(wide), draft_logits.to(wide)
    p, q = target.softmax(dim=-1), draft.softmax(dim=-1)
    side = 0.5 * (q - p).sign()
    distance = 0.5 * (q - p).abs().sum(dim=-1)
    entropy = draft.logsumexp(dim=-1) - draft.gather(1, labels[:, None])[:, 0]
    is_label = torch.arange(draft.shape[1], device=draft.device) == labels[:, None]
    slope = CE_SHARE * (q - is_label.to(wide)) + (1 - CE_SHARE) * q * (side - (q * side).sum(dim=-1, keepdim=True))
    return (weights[:, None] * slope).to(draft_logits.dtype), distance, entropy


class VocabularyLoss(torch.autograd.Function):
    """sum_rows weights (0.1 CE + 0.9 TV), chunk by chunk; the gradient is computed with the loss, and the logits of a
    chunk are dropped before the next.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        markov_w2: torch.Tensor,
        target_hidden: torch.Tensor,
        head: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        gradients: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and TV [R].

        Args:
            ctx: keeps the gradients.
            hidden: [R, hidden].
            embedded: [R, rank], W1 row of the previous token, in the dtype of `hidden`.
            markov_w2: [V, rank], master weights.
            target_hidden: [M, hidden] normed target states.
            head: [V, hidden + rank] scratch, the frozen output head in its first columns; the others are overwritten by
                W2. One product then gives the corrected logits.
            rows: target rows [R] int64, labels [R], weights [R].
            gradients: `row_gradients`, perhaps compiled.
        """
        width = hidden.shape[1]
        head[:, width:].copy_(markov_w2)
        inputs = torch.cat([hidden, embedded], dim=1)
        inputs_grad = torch.empty_like(inputs)
        w2_grad = torch.zeros_like(markov_w2)
        distances, total = [], torch.zeros((), dtype=markov_w2.dtype, device=hidden.device)
        size = math.ceil(hidden.shape[0] / NUM_CHUNKS)
        for start in range(0, hidden.shape[0], size):
            chunk = slice(start, start + size)
            target_rows, labels, weights = (column[chunk] for column in rows)
            target_logits = target_hidden[target_rows] @ head[:, :width].T
            slope, distance, entropy = gradients(target_logits, inputs[chunk] @ head.T, labels, weights)
            torch.mm(slope, head, out=inputs_grad[chunk])
            w2_grad += slope.T @ embedded[chunk]
            total += (weights * (CE_SHARE * entropy + (1 - CE_SHARE) * distance)).sum()
            distances.append(distance)
        ctx.save_for_backward(inputs_grad, w2_grad)
        ctx.width = width
        tv = torch.cat(distances)
        ctx.mark_non_differentiable(tv)
        return total, tv

    @staticmethod
    def backward(ctx: Any, loss_grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale what the forward pass computed."""
        inputs_grad, w2_grad = ctx.saved_tensors
        scaled = inputs_grad * loss_grad.to(inputs_grad.dtype)
        return scaled[:, : ctx.width], scaled[:, ctx.width :], w2_grad * loss_grad, None, None, None, None


def row_weights(valid: torch.Tensor, block_size: int) -> torch.Tensor:
    """[R] float32 weights that decay along the block and sum to 1 over the valid rows."""
    decay = torch.exp(-torch.arange(block_size, device=valid.device) / DECAY_ROWS)
    weights = valid * decay.repeat(valid.shape[0] // block_size)
    return weights / weights.sum().clamp_min(1.0)


def confidence_loss(logits: torch.Tensor, tv: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """BCE of confidence logits [R] against the acceptance 1 - tv [R], as the mean under `weights`."""
    return (weights * F.binary_cross_entropy_with_logits(logits, 1 - tv, reduction="none")).sum()
