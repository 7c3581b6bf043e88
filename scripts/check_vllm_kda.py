"""KDA targets on vLLM's V2 runner: our verify and commit against vLLM's own, on a GPU. Prints OK or FAILED per law.

    python3 scripts/check_vllm_kda.py --out kda.json                  Kimi K3's layers: six engines, about 4 minutes
    python3 scripts/check_vllm_kda.py --gate low-rank --out low.json  Kimi Linear's: four engines
    ... --only ours-graph,plain                                       some engines, and the laws that need no others

Each engine is a process of its own, on a tiny random target with a drafter that guesses two tokens of three
(`kda_pair.py`). vLLM drafts and judges in all of them; only the KDA kernels differ, by additional_config "dspark_kda".
Requests have prompts of 180 to 250 tokens and end at different lengths, more of them than run at a time: windows of 9
tokens, batches mixed with prefill, and graphs padded with rows that have none.

Exact equality with plain decoding is not to be had in bfloat16: two logits that round to the same number are told apart
by the order of a sum. So the plain engine reads every text that another engine wrote and gives the logarithm of
each token's probability; for a greedy text the distance to the best token (the gap) is 0, or the size of the rounding.
vLLM's own kernels show which gaps rounding makes.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WINDOW_DRAFTS = 8
LENGTHS = range(180, 260, 10)
MAX_TOKENS = range(150, 70, -10)  # one for each prompt
EXTRA = 7  # tokens that a follow-up adds to an earlier text
TEMPERATURE = 0.4
RUNNING = 5
GRAPHS = {True: [9, 18, 36, 45], False: [1, 2, 4]}  # tokens of captured batches, with drafts and without
GAP = 0.3  # a gap that bfloat16 makes on this target; logits are near 8, and 1/16 apart there
ERRORS = 4.5  # standard errors between two means that count as different: 7 in a million by chance

ENGINES = {
    "full-rank": ("ours-graph", "vllm-graph", "ours-eager", "ours-cached", "vllm-cached", "plain"),
    "low-rank": ("ours-graph", "vllm-snapshots", "vllm-replay", "plain"),
}
# vLLM's Kimi Linear layer has no RecoverSSM, though the option is taken: reported, and no law of ours.
REPORTED_ONLY = ("vllm-replay",)


def prompts() -> list[list[int]]:
    """Token ids, the same in every engine."""
    return [[5 + (7 * i + 13 * t + t * t // 3) % 1000 for t in range(n)] for i, n in enumerate(LENGTHS)]


def make_engine(name: str, folder: Path):
    """The engine of a name, on the pair in `folder`."""
    from vllm import LLM

    additional = {"dspark": {"chain": "vllm", "verification": "vllm"}}
    if name.startswith("vllm"):
        additional["dspark_kda"] = "vllm"
    options = {}
    if name != "plain":
        options["speculative_config"] = {
            "method": "dspark",
            "model": str(folder / "drafter"),
            "num_speculative_tokens": WINDOW_DRAFTS,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        }
        options["use_replayssm"] = name != "vllm-snapshots"
    return LLM(
        str(folder / "target"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=2**30,
        enforce_eager=name.endswith("eager"),
        compilation_config={"cudagraph_capture_sizes": GRAPHS[name != "plain"]},
        enable_prefix_caching=name.endswith("cached"),
        disable_log_stats=False,
        additional_config=additional,
        seed=0,
        **options,
    )


def watch_commits() -> list[int]:
    """Sizes of the batches that our commit folds, as they happen."""
    from dspark.vllm import kda

    folded: list[int] = []
    vllms_call = kda.ReplayCommit.commit

    def commit(self, accepted, state_indices, *rest, **named):
        folded.append(len(state_indices))
        return vllms_call(self, accepted, state_indices, *rest, **named)

    kda.ReplayCommit.commit = commit
    return folded


def acceptance(llm) -> list[float]:
    """Steps with drafts so far, and how many of them accepted the draft at each position."""
    counts: dict[str, float] = {}
    positions = [0.0] * WINDOW_DRAFTS
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            counts["drafts"] = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            positions = list(metric.values)
    return [counts.get("drafts", 0.0), *positions]


def run(llm, texts: list[list[int]], temperature: float, lengths=None) -> dict:
    """Generate, and report tokens, cached tokens, seconds and what was accepted."""
    from vllm import SamplingParams

    before, start = acceptance(llm), time.perf_counter()
    params = [
        SamplingParams(max_tokens=n, temperature=temperature, seed=100 + i, ignore_eos=True, detokenize=False)
        for i, n in enumerate(lengths or MAX_TOKENS)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False)
    return {
        "prompts": texts,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "cached": [o.num_cached_tokens or 0 for o in outputs],
        "seconds": time.perf_counter() - start,
        "accepted": [a - b for a, b in zip(acceptance(llm), before, strict=True)],
    }


def score(llm, part: dict) -> dict:
    """What the plain engine thinks of a part's texts: log probability of each token, and its distance to the best."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    texts = [prompt + tokens for prompt, tokens in zip(part["prompts"], part["tokens"], strict=True)]
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    logprobs, gaps = [], []
    for prompt, text, output in zip(part["prompts"], texts, outputs, strict=True):
        rows, tokens = list(output.prompt_logprobs)[len(prompt) :], text[len(prompt) :]
        own = [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
        logprobs.append(own)
        gaps.append([max(x.logprob for x in row.values()) - value for row, value in zip(rows, own, strict=True)])
    return {"logprobs": logprobs, "gaps": gaps}


def engine_main(name: str, folder: Path, results: Path) -> None:
    """One engine's process: write its results as JSON."""
    start = time.perf_counter()
    llm = make_engine(name, folder)
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    found = {
        "load_seconds": time.perf_counter() - start,
        "replaying": sum(bool(getattr(layer, "replays", False)) for layer in layers),
        "block_size": config.cache_config.mamba_block_size,
        "cache_mode": config.cache_config.mamba_cache_mode,
    }
    folded = watch_commits() if name.startswith("ours") else []
    parts = {"greedy": run(llm, prompts(), 0.0), "sampled": run(llm, prompts(), TEMPERATURE)}
    if name.endswith("cached"):
        longer = [
            [*prompt, *tokens, *range(10, 10 + EXTRA)]
            for prompt, tokens in zip(parts["greedy"]["prompts"], parts["greedy"]["tokens"], strict=True)
        ]
        parts["follow-up"] = run(llm, longer, 0.0, [60] * len(longer))
    elif name != "plain":
        parts["sampled again"] = run(llm, prompts(), TEMPERATURE)
    found["commits"] = len(folded)
    if name == "plain":
        others = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
        others["plain"] = {"parts": parts}
        found["scores"] = {
            other: {part: score(llm, parts) for part, parts in data["parts"].items() if part != "sampled again"}
            for other, data in others.items()
        }
    (results / f"{name}.json").write_text(json.dumps(found | {"parts": parts}))


class Report:
    """Laws that hold or do not."""

    def __init__(self) -> None:
        self.laws: list[dict] = []
        self.notes: list[dict] = []

    def law(self, text: str, holds: bool, figure: object = "") -> None:
        """Print a law with its figure, and keep both."""
        self.laws.append({"law": text, "holds": bool(holds), "figure": figure})
        print(f"{'OK' if holds else 'FAILED':6s} {text}  {figure}", flush=True)

    def note(self, text: str, figure: object) -> None:
        """Print and keep a figure that no law of ours is about."""
        self.notes.append({"note": text, "figure": figure})
        print(f"{'note':6s} {text}  {figure}", flush=True)


def mean_accepted(parts: dict, part: str) -> tuple[float, float]:
    """Mean drafts accepted in a step, and its standard error, steps counted as independent."""
    steps, *positions = parts[part]["accepted"]
    if not steps:
        return 0.0, 0.0
    mean = sum(positions) / steps
    square = sum((2 * i + 1) * count for i, count in enumerate(positions)) / steps  # E[n^2] from P(n > i)
    return mean, math.sqrt(max(square - mean * mean, 0.0) / steps)


def flat(rows: list[list[float]]) -> list[float]:
    """One list of several."""
    return [x for row in rows for x in row]


def first_difference(a: list[list[int]], b: list[list[int]]) -> list[int | None]:
    """For each text the place of the first token that differs."""
    pairs = [list(zip(s, t, strict=False)) for s, t in zip(a, b, strict=True)]
    return [next((i for i, (x, y) in enumerate(pair) if x != y), None) for pair in pairs]


def check_alone(report: Report, name: str, data: dict) -> None:
    """Laws of one engine."""
    parts = data["parts"]
    if name.startswith("ours"):
        report.law(f"{name}: the recurrent layers replay with our kernels", data["replaying"] == 6, data["replaying"])
        report.law(f"{name}: our commit folds the steps", data["commits"] > 100, data["commits"])
    elif name not in ("plain", *REPORTED_ONLY):
        report.law(f"{name}: vLLM's own layers run", data["replaying"] == 0)
    if "sampled again" in parts and name not in REPORTED_ONLY:
        same = parts["sampled"]["tokens"] == parts["sampled again"]["tokens"]
        report.law(f"{name}: seeded requests repeat, token by token", same)
    if "follow-up" in parts:
        follow = parts["follow-up"]
        hits = [c - len(p) for c, p in zip(follow["cached"], prompts(), strict=True)]
        report.law(
            f"{name}: follow-ups start from states that decoding stored (tokens cached beyond the first prompt)",
            sum(hit > 0 for hit in hits) >= len(hits) // 2,
            hits,
        )
    if name != "plain" and name not in REPORTED_ONLY:
        for part in ("greedy", "sampled"):
            mean, error = mean_accepted(parts, part)
            report.law(
                f"{name}: {part} acceptance is neither nothing nor everything",
                0.25 < mean < WINDOW_DRAFTS - 0.5,
                f"{mean:.3f} +- {error:.3f} drafts a step, {parts[part]['seconds']:.1f} s",
            )


def check_texts(report: Report, engines: dict, scores: dict) -> None:
    """Laws of the texts under the plain engine."""
    plain = scores["plain"]
    # Plain decoding's own texts are not free of gaps: it reads them with its prefill kernels.
    bound = max(GAP, 2 * max(flat(plain["greedy"]["gaps"])))
    for name, by_part in scores.items():
        for part in by_part.keys() & {"greedy", "follow-up"}:
            gaps = flat(by_part[part]["gaps"])
            best = sum(gap == 0 for gap in gaps) / len(gaps)
            figure = f"largest gap {max(gaps):.3f}, mean {statistics.mean(gaps):.5f}, best token in {best:.2%}"
            if part == "greedy":
                texts = (engines[x]["parts"][part]["tokens"] for x in (name, "plain"))
                figure += f", first difference at {first_difference(*texts)}"
            if name in REPORTED_ONLY:
                report.note(f"{name}: {part} tokens under plain decoding", figure)
                continue
            text = f"{name}: every {part} token is plain decoding's, or within rounding of it"
            report.law(text, max(gaps) <= bound, figure)
    expected = flat(plain["sampled"]["logprobs"])
    for name in scores.keys() - {"plain", *REPORTED_ONLY}:
        found = flat(scores[name]["sampled"]["logprobs"])
        error = math.hypot(*(statistics.stdev(x) / math.sqrt(len(x)) for x in (found, expected)))
        z = (statistics.mean(found) - statistics.mean(expected)) / error
        report.law(f"{name}: sampled tokens are as probable as plain sampling's", abs(z) < ERRORS, f"z = {z:+.2f}")


def check_acceptance(report: Report, engines: dict) -> None:
    """Our kernels and vLLM's accept as much."""
    rivals = [name for name in engines if name.startswith("vllm") and name not in REPORTED_ONLY]
    for name in engines:
        if not name.startswith("ours"):
            continue
        for rival in rivals:
            for part in ("greedy", "sampled"):
                (a, da), (b, db) = (mean_accepted(engines[x]["parts"], part) for x in (name, rival))
                z = (a - b) / (math.hypot(da, db) or 1.0)
                report.law(
                    f"{name} accepts as {rival} does, {part}", abs(z) < ERRORS, f"{a:.3f} and {b:.3f}, z = {z:+.2f}"
                )


def spawn(name: str, folder: Path, results: Path, log: Path) -> bool:
    """Run an engine's process; whether it ended well."""
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | os.environ
    command = [sys.executable, __file__, "--engine", name, "--folder", str(folder), "--results", str(results)]
    started = time.perf_counter()
    with log.open("w") as stream:
        code = subprocess.run(command, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
    print(f"       {name}: {time.perf_counter() - started:.0f} s", flush=True)
    if code:
        print("\n".join(log.read_text().splitlines()[-25:]), flush=True)
    return code == 0


def parse_args() -> argparse.Namespace:
    """The command line; the last three options are this program's own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gate", choices=tuple(ENGINES), default="full-rank")
    parser.add_argument("--only", help="engines, separated by commas")
    parser.add_argument("--out", type=Path, help="write laws and figures here, and the engines' logs beside it")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main(args: argparse.Namespace) -> int:
    """Run the engines one after the other, the plain one last, and check."""
    from kda_pair import write_pair

    names = [n for n in ENGINES[args.gate] if args.only is None or n in args.only.split(",")]
    report, engines = Report(), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, results = Path(temporary) / "pair", Path(temporary) / "results"
        results.mkdir()
        logs = args.out.parent if args.out else Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        write_pair(folder, full_rank=args.gate == "full-rank")
        for name in names:
            well = spawn(name, folder, results, logs / f"kda-{args.gate}-{name}.log")
            (report.note if name in REPORTED_ONLY else report.law)(f"{name}: the engine runs to its end", well)
            if well:
                engines[name] = json.loads((results / f"{name}.json").read_text())
                check_alone(report, name, engines[name])
    check_acceptance(report, engines)
    if "plain" in engines:
        check_texts(report, engines, engines["plain"].pop("scores"))
    failed = sum(not law["holds"] for law in report.laws)
    print(f"{len(report.laws) - failed} of {len(report.laws)} laws hold")
    if args.out:
        figures = {
            name: {key: value for key, value in data.items() if key != "parts"}
            | {part: {k: found[k] for k in ("accepted", "seconds", "cached")} for part, found in data["parts"].items()}
            for name, data in engines.items()
        }
        args.out.write_text(json.dumps({"laws": report.laws, "notes": report.notes, "engines": figures}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    arguments = parse_args()
    if arguments.engine:
        engine_main(arguments.engine, arguments.folder, arguments.results)
    else:
        sys.exit(main(arguments))
