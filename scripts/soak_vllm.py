"""Load a DSpark server with random requests, and compare everything that can be compared.

    python scripts/soak_vllm.py TARGET DRAFTER
    python scripts/soak_vllm.py TARGET DRAFTER --requests 200 --concurrency 16 --num-draft-tokens 7

Starts `vllm serve` on loopback, sends random prompts with random sampling settings, some of them abandoned after a few
tokens, and asks each prompt again at temperature 0. Those answers must equal the same vLLM without speculation, in
float32, token for token; and at the end no block of the KV cache may be left in use. Needs vLLM; `scripts/test_vllm`
makes an environment with it.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

START_TIMEOUT_S = 300


@dataclass(frozen=True)
class Job:
    """One random request. `abort_after`: tokens after which the client goes away; None reads to the end."""

    prompt: list[int]
    max_tokens: int
    sampling: dict[str, float]
    abort_after: int | None


def random_jobs(num_requests: int, vocab_size: int, max_model_len: int, seed: int) -> list[Job]:
    """Lengths from one token to half of the model's, all kinds of sampling, every fifth request abandoned."""
    draw = random.Random(seed)
    jobs = []
    for index in range(num_requests):
        prompt = [draw.randrange(3, vocab_size) for _ in range(draw.randint(1, max_model_len // 2))]
        sampling: dict[str, float] = {"temperature": draw.choice([0.0, 0.6, 1.0, 1.3])}
        if draw.random() < 0.5:
            sampling |= {"top_p": draw.choice([0.5, 0.9]), "top_k": draw.choice([5, 50])}
        if draw.random() < 0.5:
            sampling["seed"] = draw.randrange(2**31)
        limit = draw.randint(1, max_model_len // 2)
        jobs.append(Job(prompt, limit, sampling, draw.randint(1, 8) if index % 5 == 4 else None))
    return jobs


@contextlib.contextmanager
def serving(target: str, drafter: str | None, num_draft_tokens: int, options: Sequence[str] = ()) -> Iterator[str]:
    """Run `vllm serve` with a DSpark drafter, or plainly where it is None, and give the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speculative = {
        "model": drafter,
        "method": "dspark",
        "num_speculative_tokens": num_draft_tokens,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
    }
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", target, "--host", "127.0.0.1", "--port", str(port), *options]
    environment = os.environ | {"PYTHONSAFEPATH": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if drafter is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    process = subprocess.Popen(command, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_ready(url: str, process: subprocess.Popen) -> None:
    """Return when the server answers; fail when it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with status {process.returncode}, see its output above")
        with contextlib.suppress(URLError, ConnectionError):
            urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise RuntimeError(f"vllm serve did not answer within {START_TIMEOUT_S} s")


def stream(url: str, model: str, job: Job, sampling: dict[str, float]) -> list[int]:
    """Token ids of one streamed request, as far as they were read."""
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "stream": True,
        "return_token_ids": True,
    }
    request = Request(
        f"{url}/v1/completions", json.dumps(body | sampling).encode(), {"Content-Type": "application/json"}
    )
    tokens: list[int] = []
    with urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            tokens += json.loads(line[6:])["choices"][0]["token_ids"]
            if job.abort_after is not None and len(tokens) >= job.abort_after:
                break  # closing the connection aborts the request
    return tokens


def gauge(url: str, name: str) -> float:
    """Sum of one of vLLM's gauges over engines."""
    lines = urlopen(f"{url}/metrics", timeout=30).read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def soak(
    url: str, model: str, jobs: Sequence[Job], concurrency: int, reference: Callable[[list[Job]], list[list[int]]]
) -> list[str]:
    """Run all jobs, then compare.

    Args:
        url: address of the server.
        model: name it serves under.
        jobs: of `random_jobs`.
        concurrency: requests at a time.
        reference: greedy tokens of jobs without speculation.

    Returns:
        What was wrong, one line each; empty if all is well.
    """

    def both(job: Job) -> tuple[list[int], list[int]]:
        drawn = stream(url, model, job, job.sampling)
        whole = Job(job.prompt, job.max_tokens, {}, None)
        return drawn, stream(url, model, whole, {"temperature": 0.0})

    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(both, jobs))
    problems = []
    for index, (job, (drawn, greedy), expected) in enumerate(zip(jobs, answers, reference(list(jobs)), strict=True)):
        if greedy != expected:
            where = next((i for i, (a, b) in enumerate(zip(greedy, expected, strict=False)) if a != b), "the end")
            problems.append(f"request {index}: differs from plain decoding at token {where}")
        if not drawn or len(drawn) > job.max_tokens:
            problems.append(f"request {index}: {len(drawn)} sampled tokens, limit {job.max_tokens}")
    deadline = time.monotonic() + 30
    while gauge(url, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    if used := gauge(url, "vllm:kv_cache_usage_perc"):
        problems.append(f"{used:.1%} of the KV cache are in use with no request left")
    return problems


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", help="folder or Hub id of the target")
    parser.add_argument("drafter", help="folder or Hub id of the drafter")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main(args: argparse.Namespace) -> int:
    """Exit status 0 if nothing was wrong."""
    from vllm import LLM, SamplingParams

    length = str(args.max_model_len)
    common = ["--dtype", "float32", "--max-model-len", length, "--max-num-seqs", str(args.concurrency)]
    started = time.perf_counter()
    plain = LLM(model=args.target, dtype="float32", max_model_len=args.max_model_len, max_num_seqs=args.concurrency)
    jobs = random_jobs(args.requests, plain.get_tokenizer().vocab_size, args.max_model_len, args.seed)

    def reference(jobs: list[Job]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=job.max_tokens) for job in jobs]
        outputs = plain.generate([{"prompt_token_ids": job.prompt} for job in jobs], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with serving(args.target, args.drafter, args.num_draft_tokens, common) as url:
        problems = soak(url, args.target, jobs, args.concurrency, reference)
    print("\n".join(problems) or "no differences, no leak")
    seconds = time.perf_counter() - started
    print(json.dumps({"requests": len(jobs), "problems": len(problems), "seconds": round(seconds, 1)}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(parse_args()))
