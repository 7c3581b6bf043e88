"""Target states on disk: what scoring a drafter needs of its target, computed once for any number of drafters.

    prompts -> continuations   records.jsonl, a line per request, as soon as it ends
            -> states          shard-NNNNN.safetensors: one pass over prompt and continuation

Of each request the states are the hidden states of the tapped layers, which drafters read, and the last hidden state
before the output head. Logits are not stored: they would be `vocab_size / hidden_size` times larger, and the head gives
them again (`target_logits`). Everything keeps the target's own dtype, so nothing is rounded on the way to disk.

A folder holds one data set at one temperature. settings.json says what its content depends on, and a folder is only
continued with the same settings; the number of prompts and the taps are not among them, because more prompts and other
taps are added to what is there. A shard appears under its name when it is whole, and the requests of a pass are grouped
by their index, so an interrupted run continues to the very states that it would have given.

Read first: `dspark.evals.records` (the files of continuations). Two commands that fill and use it:

    dspark quality --dataset default --states states/
    dspark quality TARGET DRAFTER --dataset FILE.jsonl --temperature 1 --states states/
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from dspark.evals.datasets import Dataset, PromptFormat
from dspark.evals.records import RecordStore, Request, list_requests, run_requests
from dspark.evals.settings import EvalSettings, config_sha256, weights_sha256
from dspark.loop import generate
from dspark.target import HFTarget

FORMAT = 1
REQUESTS_PER_SHARD = 16
DIGEST_SAMPLES = 4096  # of each tensor: a whole digest of a target would take longer than scoring on it
HIDDEN = "hidden"
# How far logits from the stored state may lie from the model's own, as a share of the largest: they are rounded alike,
# but in products of another shape. A transformation that was missed changes them by far more.
HEAD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}


@dataclass(frozen=True)
class TargetPath:
    """One request and its continuation.

    `token_ids` are what follows the prompt; the first of them is the one that prefill gives. A draft block can start at
    each but the last. `max_new_tokens` is the length limit of this request, which the end of the target's positions
    may have lowered.
    """

    index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    max_new_tokens: int

    @property
    def num_anchors(self) -> int:
        """Tokens from which a block is drafted: all but the last."""
        return max(len(self.token_ids) - 1, 0)


class StateStore:
    """Continuations and states of one data set at one temperature, in one folder.

    Args:
        folder: created if needed.
        description: what the content depends on (`describe_states`).

    Raises:
        ValueError: the folder was made with other settings, which are named; or a file in it is damaged.
    """

    def __init__(self, folder: Path, description: dict[str, Any]):
        self.folder, self.description = folder, description
        self.continuations = RecordStore(folder, description)
        self._shard_of: dict[str, Path] = {}
        self._num_shards = 0  # one more than the last number: a shard in the middle may have been deleted
        for shard in sorted(folder.glob("shard-*.safetensors")):
            self._num_shards = int(shard.stem.removeprefix("shard-")) + 1
            with _open_shard(shard) as file:
                self._shard_of.update(dict.fromkeys(file.keys(), shard))

    def missing_layers(self, index: int, layers: Sequence[str]) -> list[str]:
        """Those of `layers` that the folder lacks for request `index`, in their order."""
        return [layer for layer in dict.fromkeys(layers) if f"{index}.{layer}" not in self._shard_of]

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Store tensors named "INDEX.LAYER" in a new shard, whole or not at all."""
        shard = self.folder / f"shard-{self._num_shards:05d}.safetensors"
        scratch = shard.with_name(shard.name + ".part")
        save_file(tensors, scratch)
        os.replace(scratch, shard)
        self._num_shards += 1
        self._shard_of.update(dict.fromkeys(tensors, shard))

    def load(self, indices: Sequence[int], layers: Sequence[str]) -> list[list[torch.Tensor]]:
        """States of requests, on the CPU.

        Args:
            indices: of requests that have all the layers.
            layers: "hidden" and "tap.N".

        Returns:
            For each request its layers: hidden [num_anchors, H], row t being what the token after `token_ids[t]` is
            predicted from; taps [rows, H] from position 0 to the last but one token that a block starts at.
        """
        return [[self._read(f"{index}.{layer}") for layer in layers] for index in indices]

    def _read(self, key: str) -> torch.Tensor:
        with _open_shard(self._shard_of[key]) as file:
            return file.get_tensor(key)


@contextmanager
def _open_shard(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} cannot be read ({error}): the disk may have been full. Delete it, and its states are computed "
            "again"
        ) from None


def tap_layers(tap_ids: Sequence[int]) -> list[str]:
    """Names of tapped layers in a store."""
    return [f"tap.{tap_id}" for tap_id in tap_ids]


def describe_states(
    target: HFTarget, settings: EvalSettings, dataset: Dataset, prompt_format: PromptFormat, temperature: float
) -> dict[str, Any]:
    """What the states of one data set at one temperature depend on, ready for JSON."""
    params = settings.sampling_params(temperature, seed=0)
    names = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "ignore_eos")
    return {
        "format": FORMAT,
        "target": {
            "model_type": target.config.model_type,
            "config_sha256": config_sha256(target.config),
            "weights_sha256": weights_sha256(target.model, DIGEST_SAMPLES),
            "dtype": str(target.dtype).removeprefix("torch."),
        },
        "dataset": {"name": dataset.name, "sha256": dataset.sha256},
        "turns": "first",
        "prompt_format": asdict(prompt_format),
        "continuation": "target",
        "sampling": {name: getattr(params, name) for name in names}
        | {"seed": settings.seed, "stop_token_ids": list(target.stop_token_ids)},
    }


def states_key(description: dict[str, Any]) -> str:
    """16 hex digits that stand for a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class TextSet:
    """One data set at one temperature: where its states are, and after `continue_prompts` the texts to score on."""

    dataset: Dataset
    temperature: float
    store: StateStore
    paths: list[TargetPath] = field(default_factory=list)


def continue_prompts(
    target: HFTarget,
    sets: Sequence[TextSet],
    settings: EvalSettings,
    prompt_format: PromptFormat,
    progress: bool = True,
) -> None:
    """The target's own continuation of every prompt, by plain decoding; what a store has is not generated again.

    All sets and temperatures run in one batch, because a step takes a GPU about as long for many requests as for few.

    Args:
        target: the target, with its tokenizer.
        sets: their paths are set, in prompt order.
        settings: sampling, seed and batch size. Every request has the seed that an evaluation would give it.
        prompt_format: how prompts are formatted.
        progress: whether to show a bar on stderr.

    Raises:
        ValueError: a stored continuation is of another prompt, because the tokenizer has changed.
    """
    waiting: list[tuple[RecordStore, Request]] = []
    listed: list[list[Request]] = []
    for texts in sets:
        listed.append(list_requests(target, texts.dataset, texts.temperature, prompt_format, settings.seed))
        waiting += [(texts.store.continuations, request) for request in texts.store.continuations.missing(listed[-1])]
    if waiting:
        plain = partial(generate, target, None, max_batch_size=settings.batch_size)
        run_requests(plain, waiting, settings, "continue", progress, keep_steps=False)  # no drafts: they say nothing
    for texts, requests in zip(sets, listed, strict=True):
        texts.paths = [
            TargetPath(
                request.prompt.index,
                tuple(request.prompt_ids),
                texts.store.continuations.records[request.key].token_ids,
                min(settings.max_new_tokens, target.max_positions - len(request.prompt_ids)),
            )
            for request in requests
        ]


def compute_states(
    target: HFTarget, store: StateStore, paths: Sequence[TargetPath], tap_ids: Sequence[int], progress: bool = True
) -> None:
    """Fill a store with the last hidden state and the given taps of every path that lacks them.

    Args:
        target: the target that the store describes.
        store: changed.
        paths: requests with their continuations.
        tap_ids: of all drafters to be scored.
        progress: whether to show a bar on stderr.

    Raises:
        ValueError: a tap is out of range, or the target's logits cannot be had from its last hidden state.
    """
    layers = [HIDDEN, *tap_layers(sorted(set(tap_ids)))]
    groups: dict[int, list[TargetPath]] = {}
    for path in paths:
        if path.num_anchors and store.missing_layers(path.index, layers):
            groups.setdefault(path.index // REQUESTS_PER_SHARD, []).append(path)
    if not groups:
        return
    num_paths = sum(map(len, groups.values()))
    with tqdm(total=num_paths, desc="states", unit="request", file=sys.stderr, disable=not progress) as bar:
        for group in groups.values():
            store.add(_states(target, store, group, layers))
            bar.update(len(group))


@torch.inference_mode()
def _states(
    target: HFTarget, store: StateStore, paths: Sequence[TargetPath], layers: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Tensors of one shard: what each path lacks of `layers`, from one pass over all of them."""
    needed = sorted({layer for path in paths for layer in store.missing_layers(path.index, layers)})
    tap_ids = [int(layer.removeprefix("tap.")) for layer in needed if layer != HIDDEN]
    target.tap(tap_ids)
    sequences = [[*path.prompt_ids, *path.token_ids[:-1]] for path in paths]
    with _last_hidden_states(target) as captured:
        output = target.prefill(target.new_cache(len(paths)), sequences)
    (hidden,) = captured
    ends = torch.tensor([len(sequence) - 1 for sequence in sequences], device=target.device)
    _check_head(target, hidden[torch.arange(len(paths), device=target.device), ends], output.logits)
    taps = output.taps.split(target.hidden_size, dim=-1)
    tensors: dict[str, torch.Tensor] = {}
    for row, (path, sequence) in enumerate(zip(paths, sequences, strict=True)):
        available = {f"tap.{tap_id}": tap[row, : len(sequence) - 1] for tap_id, tap in zip(tap_ids, taps, strict=False)}
        available[HIDDEN] = hidden[row, len(path.prompt_ids) : len(sequence)]
        for layer in store.missing_layers(path.index, layers):
            tensors[f"{path.index}.{layer}"] = available[layer].contiguous().cpu()
    return tensors


@contextmanager
def _last_hidden_states(target: HFTarget) -> Iterator[list[torch.Tensor]]:
    """Collects what the decoder returns in each pass: [B, T, H], normed, ready for the head."""
    captured: list[torch.Tensor] = []

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        captured.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    handle = target.model.get_decoder().register_forward_hook(hook)
    try:
        yield captured
    finally:
        handle.remove()


def target_logits(target: HFTarget, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of stored states, as the model itself makes them: [..., H] -> [..., V].

    The head runs in the model's own dtype: p is then rounded as in generation, where bfloat16 logits near 20 are
    multiples of 1/8, and the expected acceptance is of the p that drafts are really verified against.
    """
    config = target.config
    logits = target.model.get_output_embeddings()(hidden)
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


def _check_head(target: HFTarget, hidden: torch.Tensor, logits: torch.Tensor) -> None:
    """Refuse a target that does more to its logits than `target_logits` knows of; hidden [B, H], logits [B, V]."""
    recomputed = target_logits(target, hidden)
    error = ((recomputed - logits).abs().max() / logits.abs().max().clamp_min(1e-30)).item()
    if not error <= HEAD_TOLERANCE[logits.dtype]:
        raise ValueError(
            f"the logits of {type(target.model).__name__} differ from its output head applied to its last hidden state "
            f"(by {error:.2g} of the largest): the model changes them in a way that is not known here, and scores "
            "would be against another distribution than it samples from. Use dspark eval for this target"
        )
