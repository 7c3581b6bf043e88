"""Every kind of Markov head served by vLLM's V2 runner, with this plug-in and without, on a tiny random pair.

    python3 scripts/serve_heads_vllm.py --out heads.jsonl
    ... --heads gated,rnn --graphs --dtype bfloat16

For each head: does the engine start, does its greedy output equal that of the same vLLM without speculation, and how
many tokens does a step give? vLLM's own DSpark knows the vanilla head only; what it does with the others is printed as
it is. The target's next token depends mostly on the last one, and the heads hold a low-rank copy of that dependence,
each behind its own gate or recurrence: computed wrongly, its drafts are rejected. Weights are random, seeds fixed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HEADS = ("vanilla", "gated", "rnn", "none", "rnn-1+N", "gated-reduced")
VOCAB, HIDDEN, LAYERS, RANK, BLOCK = 512, 128, 6, 128, 6
NUM_DRAFTS, NUM_TOKENS = 5, 64
PROMPTS = [[5 + i, 20, 30 + i] * (1 + 3 * i) for i in range(7)]
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
REFUSALS = (ValueError, TypeError, RuntimeError, AssertionError, AttributeError, KeyError, IndexError)


def write_target(folder: Path) -> dict[str, torch.Tensor]:
    """A Qwen3 whose layers add little to the residual stream; returns its embedding, head and [V, V] next logits."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.002)
            layer.mlp.down_proj.weight.mul_(0.0005)
        logits = model(torch.arange(VOCAB)[:, None]).logits[:, 0]
    model.save_pretrained(folder)
    return {"embed": model.model.embed_tokens.weight.data, "head": model.lm_head.weight.data, "follow": logits}


def write_drafter(folder: Path, name: str, target: dict[str, torch.Tensor]) -> Path:
    """A drafter with one kind of head, in the DeepSpec packaging; with a reduced vocabulary in that of speculators."""
    from safetensors.torch import save_file

    kind, fill, reduced = name.split("-")[0], name.endswith("1+N"), name.endswith("reduced")
    kept = torch.arange(0, VOCAB, 2) if reduced else torch.arange(VOCAB)
    backbone = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "layer_types": ["full_attention"] * 2,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    drafter = {
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "markov_rank": 0 if kind == "none" else RANK,
        "markov_head_type": "vanilla" if kind == "none" else kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": kind != "none",
        "sample_from_anchor": not fill and not reduced,
    }
    taps = [1, 3, 4]
    if reduced:
        methods = [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}]
        config = drafter | {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
            "draft_vocab_size": len(kept),
            "speculators_config": {
                "algorithm": "dspark",
                "default_proposal_method": "greedy",
                "proposal_methods": methods,
                "verifier": {"name_or_path": "tiny", "architectures": ["Qwen3ForCausalLM"]},
            },
            "transformer_layer_config": backbone,
        }
    else:
        config = (
            backbone
            | drafter
            | {
                "architectures": ["Qwen3DSparkModel"],
                "target_layer_ids": taps,
                "num_target_layers": LAYERS,
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = backbone_weights(target, kept, len(taps)) | head_weights(kind, target["follow"][:, kept])
    if reduced:
        flags = torch.zeros(VOCAB, dtype=torch.bool)
        flags[kept] = True
        weights |= {"d2t": kept - torch.arange(len(kept)), "t2d": flags}
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors")
    return folder


def backbone_weights(target: dict[str, torch.Tensor], kept: torch.Tensor, taps: int) -> dict[str, torch.Tensor]:
    """Embedding and head of the target, and layers that add little."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    weights = {
        "embed_tokens.weight": target["embed"].clone(),
        "lm_head.weight": target["head"][kept] * 0.25,
        "fc.weight": normal(HIDDEN, taps * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(2):
        at = f"layers.{layer}."
        weights |= {at + f"self_attn.{name}_norm.weight": torch.ones(64) for name in "qk"}
        weights |= {
            at + f"{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")
        }
        shapes = {"q": (256, HIDDEN), "k": (128, HIDDEN), "v": (128, HIDDEN)}
        weights |= {at + f"self_attn.{name}_proj.weight": normal(*shape) for name, shape in shapes.items()}
        weights[at + "self_attn.o_proj.weight"] = normal(HIDDEN, 256, scale=0.002)
        weights |= {at + f"mlp.{name}_proj.weight": normal(256, HIDDEN) for name in ("gate", "up")}
        weights[at + "mlp.down_proj.weight"] = normal(HIDDEN, 256, scale=0.01)
    return weights


def head_weights(kind: str, follow: torch.Tensor) -> dict[str, torch.Tensor]:
    """The head [V, kept] -> low rank, behind the gate or recurrence of its kind; and a confidence head."""
    generator = torch.Generator().manual_seed(2)
    width = HIDDEN if kind == "none" else HIDDEN + RANK
    weights = {
        "confidence_head.proj.weight": torch.randn(1, width, generator=generator) * 0.1,
        "confidence_head.proj.bias": torch.zeros(1),
    }
    if kind == "none":
        return weights
    left, size, right = torch.linalg.svd(follow, full_matrices=False)
    # Half of the dependence is the bias, the other half the base logits.
    w1, w2 = left[:, :RANK] * size[:RANK].sqrt(), right[:RANK].T * size[:RANK].sqrt()
    if kind == "gated":
        # A gate that halves some features and keeps others; W2 undoes it.
        bias = torch.linspace(-1.0, 2.0, RANK)
        weights["markov_head.gate_proj.weight"] = torch.randn(RANK, HIDDEN + RANK, generator=generator) * 0.01
        weights["markov_head.gate_proj.bias"] = bias
        w2 = w2 / torch.sigmoid(bias)
    if kind == "rnn":
        # tanh of a tenth of the embedding is a tenth of it, nearly; the state takes part with a small weight.
        joint = torch.randn(3 * RANK, 2 * RANK + HIDDEN, generator=generator) * 0.001
        scale = 0.1 / w1.abs().amax()
        joint[2 * RANK :, RANK : 2 * RANK] += scale * torch.eye(RANK)
        weights["markov_head.joint_proj.weight"] = joint
        weights["markov_head.joint_proj.bias"] = torch.zeros(3 * RANK)
        w2 = w2 / scale
    return weights | {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2}


def serve(args: argparse.Namespace) -> None:
    """A child: one engine after another, each run as a line of JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in args.heads:
        started = time.perf_counter()
        try:
            result = serve_one(args, name)
        except REFUSALS as error:  # what vLLM raises for a head that it does not know is the result
            result = {"error": last_line(error)}
        answers.write(json.dumps({"head": name, "seconds": time.perf_counter() - started} | result) + "\n")


def last_line(error: BaseException) -> str:
    """The words of an error, of the first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def serve_one(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Start an engine ("plain" without drafter), and generate greedily and at temperature 1."""
    import gc

    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"enforce_eager": not args.graphs}
    if name != "plain":
        options["speculative_config"] = {
            "method": "dspark",
            "model": str(args.folder / name),
            "num_speculative_tokens": NUM_DRAFTS,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        }
    llm = LLM(
        model=str(args.folder / "target"),
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=2**29,
        gpu_memory_utilization=0.1,
        disable_log_stats=False,
        **options,
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    result: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
            for i in range(len(inputs))
        ]
        before = counters(llm)
        outputs = llm.generate(inputs, params, use_tqdm=False)
        again = llm.generate(inputs[2:3], params[2:3], use_tqdm=False)
        grown = {key: value - before[key] for key, value in counters(llm).items()}
        steps, accepted = grown[COUNTERS[0]], grown[COUNTERS[1]]
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        result[f"T={temperature:g}"] = {
            "tokens": tokens,
            "tokens_per_step": 1 + accepted / steps if steps else 1.0,
            "alone_as_in_the_batch": list(again[0].outputs[0].token_ids) == tokens[2],
        }
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return result


def counters(llm: Any) -> dict[str, float]:
    """vLLM's speculation counters; 0 where it does not speculate."""
    values = dict.fromkeys(COUNTERS, 0.0)
    for metric in llm.get_metrics():
        name = metric.name.removesuffix("_total")
        if name in values:
            values[name] += metric.value
    return values


def compare(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown of all runs, each greedy output against the plain one."""
    plain = next(run for run in runs if run["head"] == "plain")
    lines = [
        "| head | plug-in | greedy equals plain | tokens a step, T=0 | T=1 | seeded alone as in a batch |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        if run["head"] == "plain":
            continue
        if "error" in run:
            cells = [f"does not start: {run['error']}", "", "", ""]
        else:
            greedy, sampled = run["T=0"], run["T=1"]
            same = [a == b for a, b in zip(greedy["tokens"], plain["T=0"]["tokens"], strict=True)]
            steps = [f"{each['tokens_per_step']:.2f}" for each in (greedy, sampled)]
            cells = [f"{sum(same)} of {len(same)}", *steps, str(sampled["alone_as_in_the_batch"])]
        lines.append(f"| {run['head']} | {run['plugin']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs and torch.compile; slower to start")
    parser.add_argument("--out", help="append the runs to this file, one line of JSON each")
    parser.add_argument("--logs", type=Path, default=Path("serve_heads_logs"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.heads = args.heads.split(",")
    return args


def main() -> None:
    """Write the pair, run both children side by side, and print the table."""
    args = parse_args(sys.argv[1:])
    if args.folder is not None:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target = write_target(folder / "target")
        for name in args.heads:
            write_drafter(folder / name, name, target)
        args.logs.mkdir(parents=True, exist_ok=True)
        runs, children = [], []
        for plugin, names in (("on", ["plain", *args.heads]), ("off", args.heads)):
            passed_on = ["--heads", ",".join(names), "--dtype", args.dtype, "--folder", scratch]
            command = [sys.executable, __file__, *passed_on, *(["--graphs"] if args.graphs else [])]
            chosen = {"VLLM_PLUGINS": "dspark" if plugin == "on" else "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            log = (args.logs / f"{plugin}.log").open("w")
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=os.environ | chosen, text=True)
            children.append((plugin, child))
        for plugin, child in children:
            output, _ = child.communicate()
            runs += [json.loads(line) | {"plugin": plugin} for line in output.splitlines()]
    if args.out:
        with Path(args.out).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(run) + "\n" for run in runs)
    print(compare(runs))


if __name__ == "__main__":
    main()
