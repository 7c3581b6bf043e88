"""Train a DSpark drafter for one target on the documents of make_training_data.py.

    python scripts/train_drafter.py --target default --data /tmp/data --out /tmp/drafter --minutes 14
    python scripts/train_drafter.py --target default --data /tmp/data --out /tmp/drafter --minutes 14 --resume \\
        --stop-after 9

The target runs along: its taps and its next-token distributions are computed for every batch and never stored. Weights
are float32, the passes run on a copy in the target's dtype; the loss and the blocks are in `block_training.py`.
Learning rate, warm-up and decay follow the share of --minutes (or --steps) that is spent, compilation not counted.
Every --save-every seconds DIR gets checkpoint.pt (for --resume), a line in log.jsonl, and a complete drafter:
config.json, model.safetensors, training.json.

Cost of a step with 23,040 tokens and as many block rows (SmolLM2-135M, 3 layers): target pass 4.9 TFLOP, vocabulary
products 4.4 (target and draft logits, two gradients), drafter 1.5; the vocabulary loss also moves 16 to 25 GB and the
target pass 20 GB through memory. On an H200 that is about 15 + 12 + 8 ms: the target pass bounds the step, closely
followed by the loss.
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

import numpy as np
import torch
from drafter_trainer import TOKENS_PER_ANCHOR, Trainer
from make_training_data import load
from training_files import TrainingData, export, hub_config

from dspark.target import HFTarget

WARM_UP = 0.03  # share of the budget
VALIDATION_BATCHES = 8
CHECKPOINT = "checkpoint.pt"
# Flags that a resumed run may change: where things are, how they are computed, when it stops and talks.
FREE_FLAGS = ("data", "out", "device", "attention", "compile", "stop_after", "resume", "save_every", "print_every")


class Run:
    """Progress of one training: where it is in the data and in its budget, and what is written on the way."""

    def __init__(self, trainer: Trainer, target: HFTarget, source: str, args: argparse.Namespace) -> None:
        """Start at the beginning."""
        self.trainer, self.target, self.source, self.args = trainer, target, source, args
        self.num_steps, self.epoch, self.place, self.spent_s = 0, 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.order: list[tuple[int, torch.Tensor]] = []
        self.validation = self._batches(trainer.data.held_out, [args.seed])[:VALIDATION_BATCHES]

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
            self.order = self._batches(self.trainer.data.training, [self.args.seed, self.epoch])
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
        entry = {
            "step": self.num_steps,
            "epoch": self.epoch,
            "spent_s": round(self.spent_s, 1),
            "lr": self.learning_rate(),
            **figures,
        }
        self.history.append(entry)
        print(f"validation at step {self.num_steps}: " + json.dumps(figures), flush=True)
        with (self.args.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        state = {
            "master": self.trainer.master.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "generator": self.trainer.generator.get_state(),
            "tap_scale": self.trainer.tap_scale,
            "run": {
                "num_steps": self.num_steps,
                "epoch": self.epoch,
                "place": self.place,
                "spent_s": self.spent_s,
                "history": self.history,
            },
        }
        torch.save(state, self.args.out / (CHECKPOINT + ".tmp"))
        (self.args.out / (CHECKPOINT + ".tmp")).replace(self.args.out / CHECKPOINT)
        export(
            self.args.out,
            self.trainer.export_weights(),
            hub_config(self.trainer.config, self.target),
            self.record(final),
        )
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
                    f"{self.spent_s:6.1f} s  step {self.num_steps:6d}  epoch {self.epoch}  "
                    f"loss {float(losses) / count:.4f}  norm {float(norm):.2f}  "
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
    budget.add_argument(
        "--stop-after", type=float, default=math.inf, help="minutes after which this run stops, to be resumed"
    )
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
    training.add_argument(
        "--batch-tokens", type=int, default=23040, help="23040 = 2^9 * 45 suits eight lengths up to 640"
    )
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


def check_resumed(args: argparse.Namespace, data: TrainingData) -> None:
    """Refuse to continue a run with other flags or data than training.json says (ValueError naming them)."""
    record = json.loads((args.out / "training.json").read_text(encoding="utf-8"))
    stored = {**record["flags"], "data": record["data"]}
    now = {name: value for name, value in vars(args).items() if name not in FREE_FLAGS}
    now["data"] = json.loads(json.dumps(data.summary()))
    differing = [name for name, value in now.items() if stored.get(name) != value]
    if differing:
        listed = "; ".join(
            f"--{name.replace('_', '-')}: stored {stored.get(name)}, now {now[name]}" for name in differing
        )
        raise ValueError(
            f"--resume: {args.out} was begun with other settings, and one drafter would be trained in two ways: "
            f"{listed}. Give the stored values, or start in another folder"
        )


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    args = parse_args(argv)
    if args.resume and not (args.out / CHECKPOINT).is_file():
        raise ValueError(f"--resume: {args.out} has no {CHECKPOINT}; start without it")
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    target, source = load(args.target, args.device, args.dtype)
    data = TrainingData(args.data, target.device, args.validation)
    if args.resume:
        check_resumed(args, data)
    trainer = Trainer(target, data, args)
    run = Run(trainer, target, source, args)
    print(
        f"{source}; {data.summary()}; buckets {trainer.buckets}; loaded in {time.perf_counter() - begin:.1f} s",
        flush=True,
    )
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
    print(
        f"tokens_per_step {figures['tokens_per_step']:.3f}, greedy {figures['greedy_tokens_per_step']:.3f}: {args.out}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
