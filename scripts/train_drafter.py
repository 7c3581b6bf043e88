"""Train a DSpark drafter for one target on the documents of make_training_data.py.

    python scripts/train_drafter.py --target default --data /tmp/data --out /tmp/drafter --minutes 14
    python scripts/train_drafter.py --target default --data /tmp/data --out /tmp/drafter --minutes 14 --resume --stop-after 9

The target runs along: its taps and its next-token distributions are computed for every batch and never stored. Weights are float32, the passes run on a copy in the target's dtype; the loss and
the blocks are in `block_training.py`. Learning rate, warm-up and decay follow the share of --minutes (or --steps) that is spent, compilation not counted. Every --save-every seconds
DIR gets checkpoint.pt (for --resume), a line in log.jsonl, and a complete drafter: config.json, model.safetensors, training.json.

Cost of a step with 23,040 tokens and as many block rows (SmolLM2-135M, 3 layers): target pass 4.9 TFLOP, vocabulary products 4.4 (target and draft logits, two gradients), drafter 1.5; the vocabulary
loss also moves 16 to 25 GB and the target pass 20 GB through memory. On an H200 that is about 15 + 12 + 8 ms: the target pass bounds the step, closely followed by the loss.
"""

import argparse
import json
import math
import platform
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import block_training as bt
import numpy as np
import torch
import torch.nn.functional as F
from batched_muon import BatchedMuon
from make_training_data import load
from target_stack import TargetStack
from torch import nn
from training_files import MAX_STORED_BYTES, TrainingData, export, find_buckets, hub_config

from dspark.backbone import rotary_tables
from dspark.config import DrafterConfig, LayerConfig, RopeConfig
from dspark.drafter import Drafter
from dspark.target import HFTarget

WARM_UP = 0.03  # share of the budget
CLIP_NORM = 1.0
TOKENS_PER_ANCHOR = 8  # one block of eight rows for eight tokens: as many block rows as target rows
VALIDATION_BATCHES = 8
CHECKPOINT = "checkpoint.pt"


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
    """Fan-in scale, smaller where a layer writes to the residual stream; final norm as the target's; no Markov bias at first."""
    residual = math.sqrt(2 * drafter.config.num_layers)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            std = parameter.shape[1] ** -0.5
            std /= residual if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(parameter, std=std, generator=generator)
    assert drafter.markov_head is not None
    assert drafter.confidence_head is not None
    with torch.no_grad():
        drafter.norm.weight.copy_(final_norm)
    for parameter in (drafter.markov_head.markov_w2.weight, drafter.confidence_head.proj.weight, drafter.confidence_head.proj.bias):
        nn.init.zeros_(parameter)


class Trainer:
    """Master weights, their working copy, optimisers and the passes of one step.

    The columns of the master `fc.weight` are relative to the size of the tap that each reads (`tap_scale`, from the first batch): taps of different layers differ by orders of magnitude, which neither
    initialisation nor optimiser should see. Working copy and export have the scale multiplied in.
    """

    def __init__(self, target: HFTarget, data: TrainingData, args: argparse.Namespace) -> None:
        """Build everything on the target's device.

        Raises:
            ValueError: the drafter would be larger than it may be stored, or the batch does not fit the sparse attention.
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
            raise ValueError(f"the drafter would take {num_bytes} bytes, more than {MAX_STORED_BYTES}: choose smaller --intermediate or --layers")
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
        self.sparse = bt.SparseMask(args.batch_tokens, num_rows, self.config.block_size, device) if args.attention == "sparse" else None
        self.block_hidden = torch.compile(bt.block_hidden, dynamic=False) if args.compile else bt.block_hidden
        self.row_gradients = torch.compile(bt.row_gradients, dynamic=False) if args.compile else bt.row_gradients
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [master for master, _ in self.pairs if master.ndim == 2] if self.args.optimizer == "muon" else []
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in self.master.parameters() if id(parameter) not in chosen]
        made: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=self.args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
        if matrices:
            made.append(BatchedMuon(matrices, lr=self.args.lr, weight_decay=0.01))
        return made

    @torch.no_grad()
    def measure_taps(self, batch: tuple[int, torch.Tensor]) -> None:
        """Set `tap_scale` to one over the median size of each tap channel; a median, because a few positions have enormous values."""
        tokens, _ = self.data.batch(batch[1], batch[0])
        taps, _ = self.stack.forward(tokens, self.config.tap_ids)
        size = taps[: 1 << 13].float().abs().median(dim=0).values
        self.tap_scale = 1 / size.clamp_min(1e-3 * float(size.mean()))

    @torch.no_grad()
    def refresh_copy(self) -> None:
        """Master weights -> working copy."""
        torch._foreach_copy_([copy for _, copy in self.pairs], [master for master, _ in self.pairs])
        self.copy.fc.weight.copy_(self.master.fc.weight * self.tap_scale)

    def forward(self, batch: tuple[int, torch.Tensor], generator: torch.Generator) -> tuple[torch.Tensor, bt.Blocks, dict[str, torch.Tensor]]:
        """Loss of one batch (length L, document ids [N]), its blocks, and by name: tv and confidence [R], and what made the draft logits."""
        length, documents = batch
        tokens, answer = self.data.batch(documents, length)
        taps, target_hidden = self.stack.forward(tokens, self.config.tap_ids)
        block_size = self.config.block_size
        anchors = bt.choose_anchors(answer, length // TOKENS_PER_ANCHOR, generator)
        blocks = bt.make_blocks(tokens, answer, anchors, block_size, self.config.mask_token_id)
        mask: Any = bt.dense_mask(blocks, length, block_size) if self.sparse is None else self.sparse.build(blocks, length)
        row_positions = (blocks.positions[:, :, None] + torch.arange(block_size, device=tokens.device)).flatten()
        context_tables = tuple(table[:length].repeat(documents.shape[0], 1, 1)[None] for table in self.tables)
        hidden = self.block_hidden(
            self.copy,
            taps[None],
            F.embedding(blocks.inputs, self.stack.embedding)[None],
            context_tables,
            tuple(table[row_positions][None] for table in self.tables),
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
            hidden, embedded.to(hidden.dtype), markov.markov_w2.weight, target_hidden, self.head, rows, self.row_gradients
        )
        confidence = confidence_head(hidden, embedded)
        loss = loss + bt.CONFIDENCE_WEIGHT * bt.confidence_loss(confidence, tv, weights)
        return loss, blocks, {"tv": tv, "confidence": confidence, "hidden": hidden, "embedded": embedded, "target_hidden": target_hidden}

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

        tokens_per_step = 1 + sum_k prod_{i <= k} (1 - TV_i): what a step commits on average if it drafts a whole block behind a random answer token (blocks are cut where the answer ends);
        greedy_tokens_per_step has agreement of the argmax in place of 1 - TV.
        """
        generator = torch.Generator(self.stack.device).manual_seed(0)
        block_size, sums = self.config.block_size, []
        for batch in batches:
            loss, blocks, made = self.forward(batch, generator)  # with gradients enabled, so that compiled code is reused
            valid = blocks.valid.view(-1, block_size)
            accept, same = (value.view(-1, block_size) * valid for value in (1 - made["tv"], self.agreement(blocks, made)))
            gap = (made["confidence"].detach().sigmoid() - (1 - made["tv"])).view(-1, block_size) * valid
            per_block = [valid[:, :1], accept.cumprod(1).sum(1, keepdim=True), same.cumprod(1).sum(1, keepdim=True), loss.detach() * valid[:, :1]]
            sums.append(torch.cat([*per_block, valid, accept, same, gap, gap.abs()], dim=1).double().sum(0))
        num_blocks, accepted, agreed, loss_sum, *rest = torch.stack(sums).sum(0).tolist()
        rows, accept_sum, same_sum, gap_sum, distance = (np.array(rest).reshape(5, block_size)).tolist()
        return {
            "tokens_per_step": 1 + accepted / num_blocks,
            "greedy_tokens_per_step": 1 + agreed / num_blocks,
            "loss": loss_sum / num_blocks,
            "accept_by_position": [round(total / max(count, 1), 4) for total, count in zip(accept_sum, rows, strict=True)],
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


class Run:
    """Progress of one training: where it is in the data and in its budget, and what is written on the way."""

    def __init__(self, trainer: Trainer, target: HFTarget, source: str, args: argparse.Namespace) -> None:
        """Start at the beginning."""
        self.trainer, self.target, self.source, self.args = trainer, target, source, args
        self.num_steps, self.epoch, self.place, self.spent_s = 0, 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.order: list[tuple[int, torch.Tensor]] = []
        held_out = np.arange(trainer.data.num_training, len(trainer.data.host_lengths))
        self.validation = self._batches(held_out, [args.seed])[:VALIDATION_BATCHES]

    def _batches(self, documents: np.ndarray, seed: list[int]) -> list[tuple[int, torch.Tensor]]:
        data, device = self.trainer.data, self.trainer.stack.device
        order = data.batches(documents, self.trainer.buckets, self.args.batch_tokens, seed)
        ids = torch.from_numpy(np.concatenate([ids for _, ids in order])).to(device)  # one copy an epoch, none a step
        return list(zip([length for length, _ in order], ids.split([len(ids) for _, ids in order]), strict=True))

    def next_batch(self) -> tuple[int, torch.Tensor]:
        """The next batch; epochs follow each other, each in its own order."""
        if not self.order or self.place == len(self.order):
            if self.order:
                self.epoch, self.place = self.epoch + 1, 0
            self.order = self._batches(np.arange(self.trainer.data.num_training), [self.args.seed, self.epoch])
        self.place += 1
        return self.order[self.place - 1]

    def progress(self) -> float:
        """Share of the budget that is spent, 0..1."""
        by_steps = self.num_steps / self.args.steps if self.args.steps else 0.0
        by_time = self.spent_s / (60 * self.args.minutes) if self.args.minutes else 0.0
        return min(max(by_steps, by_time), 1.0)

    def learning_rate(self) -> float:
        """Linear warm-up, then linear decay to zero."""
        progress = self.progress()
        return self.args.lr * min(progress / WARM_UP + 1e-3, (1 - progress) / (1 - WARM_UP), 1.0)

    def save(self, final: bool) -> dict[str, Any]:
        """Validate, log, checkpoint and export; returns the figures."""
        figures = self.trainer.validate(self.validation)
        entry = {"step": self.num_steps, "epoch": self.epoch, "spent_s": round(self.spent_s, 1), "lr": self.learning_rate(), **figures}
        self.history.append(entry)
        print(f"validation at step {self.num_steps}: " + json.dumps(figures), flush=True)
        with (self.args.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        state = {
            "master": self.trainer.master.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "generator": self.trainer.generator.get_state(),
            "tap_scale": self.trainer.tap_scale,
            "run": {"num_steps": self.num_steps, "epoch": self.epoch, "place": self.place, "spent_s": self.spent_s, "history": self.history},
        }
        torch.save(state, self.args.out / (CHECKPOINT + ".tmp"))
        (self.args.out / (CHECKPOINT + ".tmp")).replace(self.args.out / CHECKPOINT)
        export(self.args.out, self.trainer.export_weights(), hub_config(self.trainer.config, self.target), self.record(final))
        return figures

    def record(self, final: bool) -> dict[str, Any]:
        """training.json: everything a model card needs."""
        flags = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self.args).items()}
        device = self.trainer.stack.device
        return {
            "command": shlex.join(["python", *sys.argv]),
            "flags": flags,
            "complete": final,
            "target": self.source,
            "data": self.trainer.data.summary(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "steps": self.num_steps,
            "epochs": self.epoch + self.place / max(len(self.order), 1),
            "training_tokens": self.num_steps * self.args.batch_tokens,
            "block_rows": self.num_steps * self.args.batch_tokens // TOKENS_PER_ANCHOR * self.trainer.config.block_size,
            "training_s": round(self.spent_s, 1),
            "drafter": asdict(self.trainer.config),
            "validation": self.history,
        }

    def restore(self) -> None:
        """Continue from the checkpoint in --out."""
        device = self.trainer.stack.device
        state = torch.load(self.args.out / CHECKPOINT, map_location=device, weights_only=True)
        self.trainer.master.load_state_dict(state["master"])
        for optimizer, saved in zip(self.trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.trainer.generator.set_state(state["generator"].cpu())
        self.trainer.tap_scale = state["tap_scale"]
        self.trainer.refresh_copy()
        for name, value in state["run"].items():
            setattr(self, name, value)
        print(f"resumed at step {self.num_steps}, {self.spent_s:.0f} s of training spent", flush=True)

    def train(self) -> dict[str, Any]:
        """Until the budget is spent or --stop-after is reached."""
        offset, begin = self.spent_s, time.perf_counter()
        printed_at, saved_at, printed_step = begin, begin, self.num_steps
        losses = torch.zeros((), device=self.trainer.stack.device)
        while self.progress() < 1:
            loss, norm = self.trainer.step(self.next_batch(), self.learning_rate())
            losses += loss
            self.num_steps += 1
            now = time.perf_counter()
            self.spent_s = offset + now - begin
            if now - printed_at > self.args.print_every:
                count, passed = self.num_steps - printed_step, now - printed_at
                print(
                    f"{self.spent_s:6.1f} s  step {self.num_steps:6d}  epoch {self.epoch}  loss {float(losses) / count:.4f}  norm {float(norm):.2f}  "
                    f"{count / passed:.2f} steps/s  {count * self.args.batch_tokens / passed / 1e3:.0f} k tokens/s",
                    flush=True,
                )
                losses.zero_()
                printed_at, printed_step = time.perf_counter(), self.num_steps
            if now - begin > 60 * self.args.stop_after:
                break
            if now - saved_at > self.args.save_every:
                self.save(final=False)
                saved_at = time.perf_counter()
        self.spent_s = offset + time.perf_counter() - begin
        return self.save(final=self.progress() >= 1)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags; the defaults are the drafter that ships with the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default", help='"default", a Hugging Face folder or a GGUF file')
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    budget = parser.add_argument_group("budget")
    budget.add_argument("--minutes", type=float, default=0.0, help="training time, over all resumed runs")
    budget.add_argument("--steps", type=int, default=0, help="number of steps, instead or in addition")
    budget.add_argument("--stop-after", type=float, default=math.inf, help="minutes after which this run stops, to be resumed")
    budget.add_argument("--resume", action="store_true")
    budget.add_argument("--save-every", type=float, default=60.0, help="seconds")
    budget.add_argument("--print-every", type=float, default=10.0, help="seconds")
    model = parser.add_argument_group("drafter")
    model.add_argument("--layers", type=int, default=3)
    model.add_argument("--intermediate", type=int, default=1024)
    model.add_argument("--target-layers", type=int, nargs="+", default=[1, 8, 15, 22, 28], help="tapped layers")
    model.add_argument("--markov-rank", type=int, default=64)
    model.add_argument("--block-size", type=int, default=8)
    model.add_argument("--mask-token", type=int, default=16)
    training = parser.add_argument_group("training")
    training.add_argument("--optimizer", choices=["muon", "adamw"], default="muon", help="for the backbone's matrices")
    training.add_argument("--lr", type=float, default=2e-3)
    training.add_argument("--batch-tokens", type=int, default=23040, help="23040 = 2^9 * 45 suits eight lengths up to 640")
    training.add_argument("--bucket-step", type=int, default=64, help="sequence lengths are multiples of this")
    training.add_argument("--validation", type=int, default=1024, help="documents held out")
    training.add_argument("--seed", type=int, default=1)
    training.add_argument("--attention", choices=["sparse", "dense"], default=None, help="default: sparse on a GPU")
    training.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="default: on a GPU")
    args = parser.parse_args(argv)
    if not args.minutes and not args.steps:
        parser.error("name a budget: --minutes or --steps")
    on_gpu = args.device.startswith("cuda")
    args.compile = on_gpu if args.compile is None else args.compile
    args.attention = args.attention or ("sparse" if on_gpu else "dense")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    args = parse_args(argv)
    if args.resume and not (args.out / CHECKPOINT).is_file():
        raise ValueError(f"--resume: {args.out} has no {CHECKPOINT}; start without it")
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    target, source = load(args.target, args.device, args.dtype)
    max_length = json.loads((args.data / "manifest.json").read_text())["settings"]["max_length"] if args.data.is_dir() else 0
    data = TrainingData(args.data, target.device, args.validation, max_length)
    trainer = Trainer(target, data, args)
    run = Run(trainer, target, source, args)
    print(f"{source}; {data.summary()}; buckets {trainer.buckets}; loaded in {time.perf_counter() - begin:.1f} s", flush=True)
    trainer.measure_taps(run.validation[0])
    trainer.refresh_copy()
    for batch in run.validation[:2]:  # compiles everything a step launches but the optimisers, before the clock starts
        trainer.backward(batch)
    if args.resume:
        run.restore()
    else:
        trainer.generator.manual_seed(args.seed)
    print(f"compiled, {time.perf_counter() - begin:.1f} s after the start", flush=True)
    figures = run.train()
    print(f"tokens_per_step {figures['tokens_per_step']:.3f}, greedy {figures['greedy_tokens_per_step']:.3f}: {args.out}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
