"""vLLM's V2 runner with the graph between the target's and the drafter's, and without it: token for token the same.

    python3 scripts/check_sampling_graph.py --gpus 2 --out sampling_graph.jsonl

Two engines on a tiny random pair, both with the plug-in and vLLM's CUDA graphs, float32; one launches from Python what
the other replays. Both get the same seeded requests in the same batches: every kind of sampling parameters alone and
mixed, prompts that are shorter than the one before in their slot, ends that leave smaller batches. After each batch
every request of it runs alone, and a greedy one once more. Batches follow from the tokens, so that the same tokens mean
the same shapes, and every text has to be the same in both engines, as have those of a greedy request's two runs alone.

In each engine a request has to give alone what it gave in the batch. Other shapes round differently, which may turn a
draw: ROUNDED_APART requests may differ. Those with top-k or top-p do not count, since vLLM computes their cuts in one
way for few rows and in another for many; prefix caching is on, so that a prompt's second pass is short.

A difference is printed with its engine and place; the exit status is 1 then, and where nothing was replayed or the
drafter's inputs were left out.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_DRAFTS = 5
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "top_p": 0.5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
]
LAUNCHED = {"temperature": 0.7, "repetition_penalty": 1.2}  # what no graph is for
COUNTS = (1, 2, 3, 5, 8, 13)
# Rounding moves probabilities by about 1e-5: of the ten thousand draws here it turns one in some runs, and never four.
ROUNDED_APART = 3

Texts = list[list[list[int]]]


def rounds() -> list[list[dict[str, Any]]]:
    """Batches of requests: prompt, seed, most tokens and sampling parameters of each."""
    chosen = [[params] * count for params in PARAMS for count in (1, 4)]
    chosen += [[PARAMS[(first + i) % len(PARAMS)] for i in range(count)] for first in (0, 4) for count in COUNTS]
    chosen += [[*PARAMS[:3], LAUNCHED], PARAMS[:3], [LAUNCHED], PARAMS[1:2]]
    found = []
    for number, batch in enumerate(chosen):
        length = 60 if number % 2 == 0 else 3
        found.append(
            [
                {
                    "prompt": [(7 * number + 3 * i + j) % 500 for j in range(length + i)],
                    "seed": 1000 * number + i,
                    "max_tokens": 16 + 5 * (i % 4),
                    "params": params,
                }
                for i, params in enumerate(batch)
            ]
        )
    return found


def is_greedy(request: dict[str, Any]) -> bool:
    """Whether no number is drawn for it."""
    return request["params"]["temperature"] == 0.0


def is_cut(request: dict[str, Any]) -> bool:
    """Whether it has a top-k or top-p."""
    return bool({"top_k", "top_p"} & set(request["params"]))


def generate(llm: Any, batch: list[dict[str, Any]]) -> list[list[int]]:
    """Texts of requests that run together."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            seed=each["seed"], max_tokens=each["max_tokens"], ignore_eos=True, detokenize=False, **each["params"]
        )
        for each in batch
    ]
    outputs = llm.generate([{"prompt_token_ids": each["prompt"]} for each in batch], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def serve(args: argparse.Namespace) -> None:
    """A child: one engine, its texts and how its steps were sampled as a line of JSON."""
    from side_by_side import ENGINE_OPTIONS, answers, start_quickly

    kept, started = answers(), time.perf_counter()
    from vllm import LLM

    from dspark.vllm.v2_graph import SampleGraphs

    start_quickly()
    calls: list[tuple[Any, bool]] = []
    without_counting = SampleGraphs.sample

    def sample(self: Any, *inputs: Any) -> Any:
        sampled = without_counting(self, *inputs)
        calls.append((self, sampled is not None))
        return sampled

    SampleGraphs.sample = sample  # type: ignore[method-assign]
    llm = LLM(
        model=str(args.folder / "target"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        kernel_config={"enable_flashinfer_autotune": False},
        speculative_config={
            "method": "dspark",
            "model": str(args.folder / args.head),
            "num_speculative_tokens": NUM_DRAFTS,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        },
        additional_config={"dspark": {"sampling_graph": args.engine == "graph"}},
        **ENGINE_OPTIONS,
    )
    texts, alone, again = [], [], []
    for batch in rounds():
        texts.append(generate(llm, batch))
        alone.append([generate(llm, [each])[0] for each in batch])
        again.append([generate(llm, [each])[0] if is_greedy(each) else None for each in batch])
    result: dict[str, Any] = {"texts": texts, "alone": alone, "again": again, "covered": 0, "recorded": 0}
    result["seconds"] = time.perf_counter() - started
    if calls:
        graphs = calls[-1][0]
        result |= {
            "covered": sum(covered for _, covered in calls),
            "left": sum(not covered for _, covered in calls),
            "recorded": len(graphs.recorded),
            "with_tail": sum(each.drafting is not None for each in graphs.recorded.values()),
            "gave_up": not graphs.limit,
        }
    kept.write(json.dumps(result) + "\n")
    kept.close()


def differences(left: Texts, right: Texts) -> list[tuple[dict[str, Any], str]]:
    """Requests whose texts part, and where, in words; without a text on either side there is nothing to compare."""
    from side_by_side import first_difference

    found = []
    for number, batch in enumerate(rounds()):
        for i, request in enumerate(batch):
            ours, theirs = left[number][i], right[number][i]
            if ours is not None and theirs is not None and ours != theirs:
                place = first_difference(ours, theirs)
                place = min(len(ours), len(theirs)) if place is None else place
                where = f"round {number}, request {i + 1} of {len(batch)}, {request['params']}: from token {place} on"
                found.append((request, where))
    return found


def report(what: str, different: list[tuple[dict[str, Any], str]], number: int, allowed: int = 0) -> bool:
    """Print a comparison of so many texts; whether no more of them differ than are allowed to."""
    print(f"{what}: {number - len(different)} of {number} texts are equal")
    for _, where in different[:6]:
        print(f"  different: {where}")
    return len(different) <= allowed


def judge(graph: dict[str, Any], launched: dict[str, Any]) -> bool:
    """Print what was seen; whether all of it is as it should be."""
    engines = {"graph": graph, "launched": launched}
    for name, result in engines.items():
        if "error" in result:
            print(f"{name}: {result['error']}")
            return False
    requests = [each for batch in rounds() for each in batch]
    greedy, whole = sum(map(is_greedy, requests)), sum(not is_cut(each) for each in requests)
    holds = True
    for part, what in (("texts", "in batches"), ("alone", "alone")):
        found = differences(graph[part], launched[part])
        holds &= report(f"graph and launched, {what}", found, len(requests))
    for name, result in engines.items():
        found = differences(result["alone"], result["again"])
        holds &= report(f"{name}, greedy alone twice", found, greedy)
        found = [each for each in differences(result["texts"], result["alone"]) if not is_cut(each[0])]
        holds &= report(f"{name}, in batches and alone", found, whole, ROUNDED_APART)
    replays = graph["covered"] - graph["recorded"]
    print(
        f"steps: {replays} replayed, {graph['recorded']} recorded, {graph.get('left', 0)} left to vLLM;"
        f" {graph.get('with_tail', 0)} of {graph['recorded']} graphs prepare the drafter's"
    )
    complete = graph["recorded"] and graph["with_tail"] == graph["recorded"] and not graph["gave_up"]
    return holds and replays > 0 and bool(complete) and not launched["covered"]


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--head", default="gated", help="of serve_heads_vllm.py")
    parser.add_argument("--gpus", type=int, default=1, help="spread the engines over so many")
    parser.add_argument("--limit", type=float, default=240, help="seconds until what still runs is stopped")
    parser.add_argument("--out", help="append the runs to this file, one line of JSON each")
    parser.add_argument("--logs", type=Path, default=Path("sampling_graph_logs"))
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Write the pair, run both engines side by side, and compare."""
    sys.path.insert(0, str(Path(__file__).parent))  # absent with -P
    args = parse_args(sys.argv[1:])
    if args.engine is not None:
        serve(args)
        return 0
    from serve_heads_vllm import write_drafter, write_target
    from side_by_side import Job, run_jobs

    engines, results = ("graph", "launched"), {}
    with tempfile.TemporaryDirectory() as scratch:
        write_drafter(Path(scratch) / args.head, args.head, write_target(Path(scratch) / "target"))
        jobs = [Job(name, ["--engine", name, "--head", args.head, "--folder", scratch]) for name in engines]
        for index, result in run_jobs(__file__, jobs, gpus=args.gpus, logs=args.logs, limit_s=args.limit, at_once=2):
            results[engines[index]] = result
            if args.out:
                with Path(args.out).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"engine": engines[index]} | result) + "\n")
    holds = judge(results["graph"], results["launched"])
    print("OK" if holds else "FAILED")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
