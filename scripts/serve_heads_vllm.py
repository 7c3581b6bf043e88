"""Every kind of Markov head served by vLLM's V2 runner, with this plug-in and without, on a tiny random pair.

    python3 scripts/serve_heads_vllm.py --out heads.jsonl --gpus 2
    ... --heads gated,rnn --graph-heads gated --dtype bfloat16

For each head: does the engine start, does its greedy output equal that of the same vLLM without speculation, and how
many tokens does a step give? vLLM's own DSpark knows the vanilla head only; what it does with the others is printed as
it is. The target's next token depends mostly on the last one, and the heads hold a low-rank copy of that dependence,
each behind its own gate or recurrence: computed wrongly, its drafts are rejected. Weights are random, seeds fixed.

And the law: LAW_REQUESTS requests of one prompt at temperature 1, each with its own seed. For each of their tokens the
counts are compared with those of plain decoding, by a chi-square statistic turned into standard errors (Wilson and
Hilferty); above MAX_Z is a failure, which happens by chance about once in 30000. "+topk" drafts from the 16 best base
logits of each row, "+fp8" with W2 in 8 bits: both change q, and may not change the law. "+launched" launches
what is otherwise in the graph of sampling.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HEADS = ("vanilla", "gated", "rnn", "none", "rnn-fill", "gated-reduced")
VOCAB, HIDDEN, LAYERS, RANK, BLOCK = 512, 128, 6, 128, 6
NUM_DRAFTS, NUM_TOKENS = 5, 64
VARIANTS: dict[str, dict[str, Any]] = {
    "topk": {"speculative_config": {"dspark_draft_topk": 16}},
    "fp8": {"additional_config": {"dspark": {"w2": "fp8"}}},
    "launched": {"additional_config": {"dspark": {"sampling_graph": False}}},
}
LAW_REQUESTS, LAW_TOKENS, LAW_PROMPT = 2000, 4, [7, 11, 13, 17]
FEW = 40  # tokens seen less often in both samples together are counted as one
MAX_Z = 4.0
PROMPTS = [[5 + i, 20, 30 + i] * (1 + 3 * i) for i in range(7)]
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

    kind, fill, reduced = name.split("-")[0], name.endswith("fill"), name.endswith("reduced")
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
    """A child: one engine, its runs as a line of JSON."""
    from side_by_side import answers

    kept, started = answers(), time.perf_counter()
    try:
        result = serve_one(args)
    except REFUSALS as error:  # what vLLM raises for a head that it does not know is the result
        result = {"error": last_line(error)}
    kept.write(json.dumps(result | {"seconds": time.perf_counter() - started}) + "\n")
    kept.close()


def last_line(error: BaseException) -> str:
    """The words of an error, of the first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def serve_one(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine ("plain" without drafter), and generate greedily and at temperature 1."""
    from side_by_side import ENGINE_OPTIONS, generate, start_quickly
    from vllm import LLM

    start_quickly()

    options: dict[str, Any] = {"enforce_eager": not args.graphs}
    if args.graphs:  # as much as is needed to run in graphs, and no torch.compile, which takes most of a start
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        options["kernel_config"] = {"enable_flashinfer_autotune": False}
    head, _, variant = args.engine.partition("+")
    if head != "plain":
        options["speculative_config"] = {
            "method": "dspark",
            "model": str(args.folder / head),
            "num_speculative_tokens": NUM_DRAFTS,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        }
    for name, value in VARIANTS.get(variant, {}).items():
        options[name] = options.get(name, {}) | value
    llm = LLM(
        model=str(args.folder / "target"),
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=512,
        max_num_seqs=64,
        **ENGINE_OPTIONS,
        **options,
    )
    result: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        tokens, per_step = generate(llm, PROMPTS, temperature, NUM_TOKENS)
        alone, _ = generate(llm, PROMPTS[2:3], temperature, NUM_TOKENS, first_seed=102)
        result[f"T={temperature:g}"] = {
            "tokens": tokens,
            "tokens_per_step": per_step,
            "alone_as_in_the_batch": alone[0] == tokens[2],
        }
    many, _ = generate(llm, [LAW_PROMPT] * LAW_REQUESTS, 1.0, LAW_TOKENS, first_seed=10000)
    result["law"] = [Counter(tokens[place] for tokens in many) for place in range(LAW_TOKENS)]
    return result


def distance(left: dict[str, int], right: dict[str, int]) -> float:
    """Standard errors between two samples of one law, from counts of tokens.

    The chi-square statistic of the two rows of counts, tokens seen less than FEW times taken together, as the number
    of a normal distribution of the same tail (Wilson and Hilferty 1931).
    """
    seen = Counter(left) + Counter(right)
    bins = [[token] for token, count in seen.items() if count >= FEW]
    rest = [token for token, count in seen.items() if count < FEW]
    if sum(seen[token] for token in rest) >= FEW:
        bins.append(rest)
    rows = [[sum(each.get(token, 0) for token in tokens) for tokens in bins] for each in (left, right)]
    totals = [sum(row) for row in rows]
    statistic = 0.0
    for row, total in zip(rows, totals, strict=True):
        for index, count in enumerate(row):
            expected = total * (rows[0][index] + rows[1][index]) / sum(totals)
            statistic += (count - expected) ** 2 / expected
    freedom = max(len(bins) - 1, 1)
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


HEADER = (
    "| head | plug-in | graphs | greedy is plain | tokens a step: T=0 | T=1 | alone as in batch: T=0 | T=1 | law |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def row(run: dict[str, Any], plain: dict[str, Any] | None) -> str:
    """A line of the table: a run against the plain one."""
    if "error" in run:
        cells = [f"does not run: {run['error']}", "", "", "", "", ""]
    else:
        greedy, sampled = run["T=0"], run["T=1"]
        cells = ["", *(f"{each['tokens_per_step']:.2f}" for each in (greedy, sampled))]
        cells += [*(str(each["alone_as_in_the_batch"]) for each in (greedy, sampled)), ""]
        if plain is not None:
            same = [a == b for a, b in zip(greedy["tokens"], plain["T=0"]["tokens"], strict=True)]
            far = max(distance(a, b) for a, b in zip(run["law"], plain["law"], strict=True))
            cells[0] = f"{sum(same)} of {len(same)}"
            cells[-1] = f"{'OK' if far < MAX_Z else 'FAILED'} ({far:.1f})"
    return f"| {run['head']} | {run['plugin']} | {run['graphs']} | {' | '.join(cells)} |"


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--off-heads", default="gated,rnn,none", help="those served without the plug-in too")
    parser.add_argument("--graph-heads", default="gated,rnn", help="those served in CUDA graphs too, plug-in on")
    parser.add_argument("--variants", default="gated+topk,gated+fp8", help="plug-in on, in CUDA graphs")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--gpus", type=int, default=1, help="spread the engines over so many")
    parser.add_argument("--at-once", type=int, default=8, help="most engines at a time")
    parser.add_argument("--limit", type=float, default=240, help="seconds until what still runs is stopped")
    parser.add_argument("--out", help="append the runs to this file, one line of JSON each")
    parser.add_argument("--logs", type=Path, default=Path("serve_heads_logs"))
    parser.add_argument("--graphs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.heads = args.heads.split(",")
    args.off_heads = [name for name in args.off_heads.split(",") if name in args.heads]
    args.graph_heads = [name for name in args.graph_heads.split(",") if name in args.heads]
    args.graph_heads += [name for name in args.variants.split(",") if name.partition("+")[0] in args.heads]
    return args


def engines(args: argparse.Namespace) -> list[tuple[str, str, bool]]:
    """(head, plug-in, in graphs) of every engine; those that matter most come first."""
    chosen = [("plain", "on", False)]
    chosen += [(name, "on", False) for name in args.heads]
    chosen += [(name, "on", True) for name in args.graph_heads]
    return chosen + [(name, "off", False) for name in args.off_heads]


def main() -> None:
    """Write the pair, run all engines side by side, and print each as it ends."""
    sys.path.insert(0, str(Path(__file__).parent))  # absent with -P
    args = parse_args(sys.argv[1:])
    if args.engine is not None:
        serve(args)
        return
    from side_by_side import Job, run_jobs

    chosen, runs, plain = engines(args), [], None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target = write_target(folder / "target")
        for name in args.heads:
            write_drafter(folder / name, name, target)
        jobs = []
        for name, plugin, graphs in chosen:
            passed_on = ["--engine", name, "--dtype", args.dtype, "--folder", scratch, *(["--graphs"] * graphs)]
            label = f"{name}-{plugin}{'-graphs' * graphs}"
            jobs.append(Job(label, passed_on, plugin=plugin == "on"))
        print(HEADER, flush=True)
        for index, result in run_jobs(
            __file__, jobs, gpus=args.gpus, logs=args.logs, limit_s=args.limit, at_once=args.at_once
        ):
            name, plugin, graphs = chosen[index]
            runs.append({"head": name, "plugin": plugin, "graphs": graphs} | result)
            if args.out:
                with Path(args.out).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
            first = plain is None
            if name == "plain" and "error" not in result:
                plain = runs[-1]
            for run in runs if first and plain is not None else runs[-1:]:
                if run is not plain:
                    print(row(run, plain), flush=True)


if __name__ == "__main__":
    main()
