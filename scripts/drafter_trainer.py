"""One training step of a drafter: the target's pass, the blocks, the loss, and the update of its float32 weights."""

import argparse
import math
from typing import Any

import block_training as bt
import numpy as np
import torch
import torch.nn.functional as F
from batched_muon import BatchedMuon
from target_stack import TargetStack
from torch import nn
from training_files import MAX_STORED_BYTES, TrainingData, find_buckets

from dspark.backbone import rotary_tables
from dspark.config import DrafterConfig, LayerConfig, RopeConfig
from dspark.drafter import Drafter
from dspark.target import HFTarget

CLIP_NORM = 1.0
TOKENS_PER_ANCHOR = 8  # one block of eight rows for eight tokens: as many block rows as target rows


def drafter_config(args: argparse.Namespace, target: HFTarget) -> DrafterConfig:
    """The drafter to train: width, heads and RoPE of the target, embedding and head shared with it."""
    own = target.config
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    return DrafterConfig(
        family="DeepSpec Qwen3",
        hidden_size=own.hidden_size,
        intermediate_size=args.intermediate,
        num_layers=args.layers,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        block_size=args.block_size,
        anchor_first=True,
        mask_token_id=args.mask_token,
        tap_ids=tuple(layer + 1 for layer in args.target_layers),
        target_hidden_size=own.hidden_size,
        rope=RopeConfig(theta=own.rope_parameters["rope_theta"]),
        layers=(LayerConfig(),) * args.layers,
        rms_norm_eps=own.rms_norm_eps,
        max_position_embeddings=own.max_position_embeddings,
        markov_kind="vanilla",
        markov_rank=args.markov_rank,
        confidence="hidden+markov",
        owns_embedding=False,
        owns_head=False,
        num_target_layers=target.num_layers,
    )


def initialise(drafter: Drafter, final_norm: torch.Tensor, generator: torch.Generator) -> None:
    """Fan-in scale, smaller where a layer writes to the residual stream; no Markov bias at first.

    The final norm has the target's profile, since the head is the target's, at half its size: states that know nothing
    yet should not speak loudly.
    """
    residual = math.sqrt(2 * drafter.config.num_layers)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            std = parameter.shape[1] ** -0.5
            std /= residual if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(parameter, std=std, generator=generator)
    assert drafter.markov_head is not None
    assert drafter.confidence_head is not None
    with torch.no_grad():
        drafter.norm.weight.copy_(0.5 * final_norm)
    for parameter in (
        drafter.markov_head.markov_w2.weight,
        drafter.confidence_head.proj.weight,
        drafter.confidence_head.proj.bias,
    ):
        nn.init.zeros_(parameter)


class Trainer:
    """Master weights, their working copy, optimisers and the passes of one step.

    The columns of the master `fc.weight` are relative to the size of the tap that each reads (`tap_scale`, from the
    first batch): taps of different layers differ by orders of magnitude, which neither initialisation nor optimiser
    should see. Working copy and export have the scale multiplied in.
    """

    def __init__(self, target: HFTarget, data: TrainingData, args: argparse.Namespace) -> None:
        """Build everything on the target's device.

        Raises:
            ValueError: the drafter would be larger than it may be stored, or the batch does not fit the sparse
                attention.
        """
        self.args, self.data = args, data
        self.config = drafter_config(args, target)
        self.stack = TargetStack(target, compile=args.compile)
        device, dtype = self.stack.device, self.stack.dtype
        self.generator = torch.Generator(device).manual_seed(args.seed)
        self.master = Drafter(self.config).to(device)
        num_bytes = 2 * sum(parameter.numel() for parameter in self.master.parameters())
        print(f"drafter: {num_bytes // 2:,} parameters, {num_bytes:,} bytes in bfloat16", flush=True)
        if num_bytes + 8192 > MAX_STORED_BYTES:
            raise ValueError(
                f"the drafter would take {num_bytes} bytes, more than {MAX_STORED_BYTES}: choose smaller "
                "--intermediate or --layers"
            )
        initialise(self.master, self.stack.final_norm, self.generator)
        self.copy = Drafter(self.config).to(device, dtype)
        in_heads = ("markov_head.", "confidence_head.")  # these two work in float32 directly
        self.pairs = [
            (parameter, dict(self.copy.named_parameters())[name])
            for name, parameter in self.master.named_parameters()
            if not name.startswith(in_heads)
        ]
        self.head = torch.cat([self.stack.head, self.stack.head.new_zeros(target.vocab_size, args.markov_rank)], dim=1)
        self.tap_scale = torch.ones(self.copy.fc.weight.shape[1], device=device)
        self.buckets = find_buckets(args.batch_tokens, args.bucket_step, int(data.host_lengths.max()))
        positions = torch.arange(self.buckets[-1] + self.config.block_size, device=device)
        self.tables = tuple(table[0] for table in rotary_tables(self.config, positions[None], dtype))
        num_rows = args.batch_tokens // TOKENS_PER_ANCHOR * self.config.block_size
        self.sparse = (
            bt.SparseMask(args.batch_tokens, num_rows, self.config.block_size, device)
            if args.attention == "sparse"
            else None
        )
        self.block_hidden = torch.compile(bt.block_hidden, dynamic=False) if args.compile else bt.block_hidden
        self.row_gradients = torch.compile(bt.row_gradients, dynamic=False) if args.compile else bt.row_gradients
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [master for master, _ in self.pairs if master.ndim == 2] if self.args.optimizer == "muon" else []
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in self.master.parameters() if id(parameter) not in chosen]
        made: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=self.args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        ]
        if matrices:
            made.append(BatchedMuon(matrices, lr=self.args.lr, weight_decay=0.01))
        return made

    @torch.no_grad()
    def measure_taps(self, batch: tuple[int, torch.Tensor]) -> None:
        """Set `tap_scale` to one over the median size of each tap channel; a median, because a few positions have
        enormous values.
        """
        tokens, _ = self.data.batch(batch[1], batch[0])
        taps, _ = self.stack.forward(tokens, self.config.tap_ids)
        size = taps[: 1 << 13].float().abs().median(dim=0).values
        self.tap_scale = 1 / size.clamp_min(1e-3 * float(size.mean()))

    @torch.no_grad()
    def refresh_copy(self) -> None:
        """Master weights -> working copy."""
        torch._foreach_copy_([copy for _, copy in self.pairs], [master for master, _ in self.pairs])
        self.copy.fc.weight.copy_(self.master.fc.weight * self.tap_scale)

    def forward(
        self, batch: tuple[int, torch.Tensor], generator: torch.Generator
    ) -> tuple[torch.Tensor, bt.Blocks, dict[str, torch.Tensor]]:
        """Loss of one batch (length L, document ids [N]), its blocks, and by name: tv and confidence [R], and what made
        the draft logits.
        """
        length, documents = batch
        tokens, answer = self.data.batch(documents, length)
        taps, target_hidden = self.stack.forward(tokens, self.config.tap_ids)
        block_size = self.config.block_size
        anchors = bt.choose_anchors(answer, length // TOKENS_PER_ANCHOR, generator)
        blocks = bt.make_blocks(tokens, answer, anchors, block_size, self.config.mask_token_id)
        mask: Any = (
            bt.dense_mask(blocks, length, block_size) if self.sparse is None else self.sparse.build(blocks, length)
        )
        row_positions = (blocks.positions[:, :, None] + torch.arange(block_size, device=tokens.device)).flatten()
        context_cos, context_sin = (table[:length].repeat(documents.shape[0], 1, 1)[None] for table in self.tables)
        block_cos, block_sin = (table[row_positions][None] for table in self.tables)
        hidden = self.block_hidden(
            self.copy,
            taps[None],
            F.embedding(blocks.inputs, self.stack.embedding)[None],
            (context_cos, context_sin),
            (block_cos, block_sin),
            bt.dense_attention if self.sparse is None else bt.sparse_attention,
            mask,
        )
        markov, confidence_head = self.master.markov_head, self.master.confidence_head
        assert markov is not None
        assert confidence_head is not None
        weights = bt.row_weights(blocks.valid, block_size)
        embedded = markov.markov_w1(blocks.previous)
        rows = (blocks.target_rows, blocks.labels, weights)
        loss, tv = bt.VocabularyLoss.apply(
            hidden,
            embedded.to(hidden.dtype),
            markov.markov_w2.weight,
            target_hidden,
            self.head,
            rows,
            self.row_gradients,
        )
        confidence = confidence_head(hidden, embedded)
        loss = loss + bt.CONFIDENCE_WEIGHT * bt.confidence_loss(confidence, tv, weights)
        return (
            loss,
            blocks,
            {
                "tv": tv,
                "confidence": confidence,
                "hidden": hidden,
                "embedded": embedded,
                "target_hidden": target_hidden,
            },
        )

    def backward(self, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        """Forward and backward pass; the gradients are left on the master weights, the loss is returned."""
        self.master.zero_grad(set_to_none=True)
        self.copy.zero_grad(set_to_none=True)
        loss, _, _ = self.forward(batch, self.generator)
        loss.backward()
        for master, copy in self.pairs:
            assert copy.grad is not None
            master.grad = copy.grad.to(master.dtype)
        assert self.master.fc.weight.grad is not None
        self.master.fc.weight.grad *= self.tap_scale
        return loss.detach()

    def step(self, batch: tuple[int, torch.Tensor], lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; returns loss and gradient norm without waiting for them."""
        loss = self.backward(batch)
        norm = nn.utils.clip_grad_norm_(self.master.parameters(), CLIP_NORM, foreach=True)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.refresh_copy()
        return loss, norm

    def agreement(self, blocks: bt.Blocks, made: dict[str, torch.Tensor]) -> torch.Tensor:
        """[R] bool: drafter and target have the same likeliest token."""
        inputs = torch.cat([made["hidden"], made["embedded"].to(made["hidden"].dtype)], dim=1).detach()
        width = made["hidden"].shape[1]
        same = []
        for rows in torch.arange(inputs.shape[0], device=inputs.device).chunk(bt.NUM_CHUNKS):
            target = (made["target_hidden"][blocks.target_rows[rows]] @ self.head[:, :width].T).argmax(dim=-1)
            same.append(target == (inputs[rows] @ self.head.T).argmax(dim=-1))
        return torch.cat(same)

    def validate(self, batches: list[tuple[int, torch.Tensor]]) -> dict[str, Any]:
        """Teacher-forced figures, pooled over all blocks of `batches` with fixed anchors.

        tokens_per_step = 1 + sum_k prod_{i <= k} (1 - TV_i): what a step commits on average if it drafts a whole block
        behind a random answer token (blocks are cut where the answer ends); greedy_tokens_per_step has agreement of the
        argmax in place of 1 - TV.
        """
        generator = torch.Generator(self.stack.device).manual_seed(0)
        block_size, sums = self.config.block_size, []
        for batch in batches:
            loss, blocks, made = self.forward(
                batch, generator
            )  # with gradients enabled, so that compiled code is reused
            valid = blocks.valid.view(-1, block_size)
            accept, same = (
                value.view(-1, block_size) * valid for value in (1 - made["tv"], self.agreement(blocks, made))
            )
            gap = (made["confidence"].detach().sigmoid() - (1 - made["tv"])).view(-1, block_size) * valid
            per_block = [
                valid[:, :1],
                accept.cumprod(1).sum(1, keepdim=True),
                same.cumprod(1).sum(1, keepdim=True),
                loss.detach() * valid[:, :1],
            ]
            sums.append(torch.cat([*per_block, valid, accept, same, gap, gap.abs()], dim=1).double().sum(0))
        num_blocks, accepted, agreed, loss_sum, *rest = torch.stack(sums).sum(0).tolist()
        rows, accept_sum, same_sum, gap_sum, distance = (np.array(rest).reshape(5, block_size)).tolist()
        return {
            "tokens_per_step": 1 + accepted / num_blocks,
            "greedy_tokens_per_step": 1 + agreed / num_blocks,
            "loss": loss_sum / num_blocks,
            "accept_by_position": [
                round(total / max(count, 1), 4) for total, count in zip(accept_sum, rows, strict=True)
            ],
            "agree_by_position": [round(total / max(count, 1), 4) for total, count in zip(same_sum, rows, strict=True)],
            "confidence_bias": sum(gap_sum) / max(sum(rows), 1),
            "confidence_error": sum(distance) / max(sum(rows), 1),
            "blocks": int(num_blocks),
        }

    def export_weights(self) -> dict[str, torch.Tensor]:
        """Tensors of the checkpoint, in bfloat16 on the CPU."""
        folded = {"fc.weight": self.master.fc.weight * self.tap_scale}
        state = {**self.master.state_dict(), **folded}
        return {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in state.items()}
