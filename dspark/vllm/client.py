"""Generate with vLLM, in this process or over HTTP, and hand back what `dspark.generate` hands back.

    llm = start_engine(target, drafter, num_draft_tokens=7)
    generations = generate_in_engine(llm, prompts, params)            # prompts are lists of token ids
    generations = generate_at_endpoint("http://localhost:8000", prompts, params)

The steps of a request come from vLLM's per-request speculation metrics (--per-request-spec-decode-metrics detailed).
A server without them is asked one request at a time, and its `vllm:spec_decode_*` counters are read in between: they
say how many steps accepted how many drafts, but not in which order. vLLM keeps neither p nor q nor confidences, so
`accept_probs` and `confidence` stay empty. Nothing here imports vLLM before an engine is started.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from dspark.records import FinishReason, Generation, StepRecord
from dspark.sampling import Drafting, SamplingParams

OnFinish = Callable[[int, Generation], None]
COUNTER = re.compile(r"^vllm:spec_decode_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
# The server counts a request's last step shortly after it has answered.
COUNTERS_PATIENCE_S = 5.0
REQUEST_TIMEOUT_S = 3600.0


def start_engine(
    target: str | Path,
    drafter: str | Path | None,
    *,
    num_draft_tokens: int | None = None,
    drafting: Drafting = "probabilistic",
    max_batch_size: int = 32,
    **engine_options: Any,
) -> Any:
    """A vLLM engine in this process, with the metrics that `generate_in_engine` reads.

    Args:
        target: folder or Hub id of the target.
        drafter: folder or Hub id of the drafter; None decodes plainly.
        num_draft_tokens: K; None leaves it to vLLM, which takes the drafter's block size.
        drafting: "probabilistic" or "greedy".
        max_batch_size: requests that run together.
        engine_options: further arguments of `vllm.LLM`.

    Returns:
        A `vllm.LLM`.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: vLLM or the plug-in refuses the configuration.
    """
    from vllm import LLM

    options: dict[str, Any] = {"model": str(target), "max_num_seqs": max_batch_size, **engine_options}
    if drafter is not None:
        speculative = {"method": "dspark", "model": str(drafter), "draft_sample_method": drafting}
        if num_draft_tokens is not None:
            speculative["num_speculative_tokens"] = num_draft_tokens  # type: ignore[assignment]
        options |= {"speculative_config": speculative, "per_request_spec_decode_metrics": "detailed"}
    return LLM(**options)


def generate_in_engine(
    llm: Any, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], on_finish: OnFinish | None = None
) -> list[Generation]:
    """Generate for every prompt.

    Args:
        llm: of `start_engine`.
        prompts: token ids.
        params: one per prompt.
        on_finish: called with (prompt index, generation) as soon as a request ends.

    Returns:
        One `Generation` per prompt, in the order of the prompts.

    Raises:
        ValueError: vLLM refuses a parameter (min_p, with any speculative method).
    """
    from vllm import SamplingParams as EngineParams

    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    first = llm.request_counter.counter  # vLLM numbers its requests, and names outputs by the number
    ids = llm.enqueue(inputs, [EngineParams(**_fields(each)) for each in params], use_tqdm=False)
    results: dict[int, Generation] = {}
    engine = llm.llm_engine
    try:
        while len(results) < len(prompts):
            for output in engine.step():
                if output.finished:
                    index, completion = int(output.request_id) - first, output.outputs[0]
                    metrics = completion.spec_decode_metrics
                    steps = [] if metrics is None else _pairs(metrics.per_step_drafted, metrics.per_step_accepted)
                    results[index] = make_generation(
                        prompts[index], completion.token_ids, steps, completion.finish_reason
                    )
                    if on_finish is not None:
                        on_finish(index, results[index])
    finally:
        unfinished = [request for index, request in enumerate(ids) if index not in results]
        if unfinished:
            engine.abort_request(unfinished, internal=True)
    return [results[index] for index in range(len(prompts))]


def generate_at_endpoint(
    url: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    model: str | None = None,
    max_batch_size: int = 8,
    on_finish: OnFinish | None = None,
) -> list[Generation]:
    """Generate for every prompt on a vLLM server.

    Args:
        url: root of the server, such as http://localhost:8000.
        prompts: token ids, of the server's tokenizer.
        params: one per prompt.
        model: name of the served model; None asks the server.
        max_batch_size: requests sent together; one at a time where the steps must be read from the counters. Then
            nobody else may use the server meanwhile.
        on_finish: called with (prompt index, generation) when a request ends, from one thread at a time.

    Returns:
        One `Generation` per prompt, in the order of the prompts.

    Raises:
        ValueError: the server cannot be reached, is no vLLM server, or refuses a request; with its own words.
    """
    server = _Server(_root(url), model)
    if model is None:
        server = _Server(server.root, server.get_json("/v1/models")["data"][0]["id"])
    results: list[Generation | None] = [None] * len(prompts)

    def finish(index: int, generation: Generation) -> None:
        results[index] = generation
        if on_finish is not None:
            on_finish(index, generation)

    pending = list(range(len(prompts)))
    if pending:  # the first answer shows whether the server reports the steps of each request
        first = pending.pop(0)
        generation, reported = server.complete(prompts[first], params[first], read_counters=True)
        finish(first, generation)
        workers = max_batch_size if reported else 1
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(server.complete, prompts[i], params[i], not reported) for i in pending]
            for index, job in zip(pending, jobs, strict=True):
                finish(index, job.result()[0])
    return [generation for generation in results if generation is not None]


@dataclass(frozen=True)
class ServedModel:
    """What a vLLM server says of itself: the model's name for requests, what it was loaded from, vLLM's version."""

    name: str
    root: str
    version: str


def served_model(url: str) -> ServedModel:
    """Ask a vLLM server what it serves.

    Raises:
        ValueError: it cannot be reached, or is no vLLM server.
    """
    server = _Server(_root(url), None)
    try:
        card = server.get_json("/v1/models")["data"][0]
        version = server.get_json("/version")["version"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{server.root} is no vLLM server: /v1/models and /version answer something else") from error
    return ServedModel(card["id"], card.get("root") or card["id"], version)


def make_generation(
    prompt_ids: Sequence[int], token_ids: Sequence[int], steps: Sequence[tuple[int, int]], finish_reason: str | None
) -> Generation:
    """A request's record from what vLLM reports of it.

    Args:
        prompt_ids: its prompt.
        token_ids: its text, a stop token included; the first token comes from prefill.
        steps: (offered, accepted) of every step that verified drafts. vLLM counts the last one whole, also where a stop
            or a limit cut it. Tokens that no such step explains were emitted by plain steps; their place is not
            reported, and they are put last.
        finish_reason: "stop" or "length".

    Raises:
        ValueError: the request did not finish by itself.
    """
    if finish_reason not in ("stop", "length"):
        raise ValueError(f"vLLM ended a request with finish_reason={finish_reason!r}; expected 'stop' or 'length'")
    reason: FinishReason = finish_reason  # type: ignore[assignment]
    generation = Generation(list(prompt_ids), list(token_ids), finish_reason=reason)
    remaining = len(token_ids) - 1
    unexplained = remaining - sum(accepted + 1 for _, accepted in steps)
    for offered, accepted in [*steps, *[(0, 0)] * unexplained]:
        committed = min(accepted + 1, remaining)
        if committed <= 0:  # vLLM verified a block that was no longer needed
            break
        position = len(prompt_ids) + len(token_ids) - 1 - remaining
        remaining -= committed
        last = reason if remaining == 0 else None
        generation.steps.append(StepRecord(position, offered, accepted, committed, finish_reason=last))
    return generation


def steps_from_counters(num_drafts: int, num_draft_tokens: int, accepted_per_position: Sequence[int], num_tokens: int):
    """(offered, accepted) of each step of one request, from the growth of vLLM's counters; the order is arbitrary.

    Args:
        num_drafts: steps that verified drafts.
        num_draft_tokens: drafts in all of them.
        accepted_per_position: steps in which the draft of each position was accepted.
        num_tokens: length of the request's text.
    """
    reached = [num_drafts, *accepted_per_position, 0]
    accepted = [j for j in range(len(reached) - 1) for _ in range(reached[j] - reached[j + 1])]
    width = max(-(-num_draft_tokens // max(num_drafts, 1)), max(accepted, default=0))
    short = width * num_drafts - num_draft_tokens
    steps = []
    for count in accepted:  # a step that offered less is one that accepted little
        missing = min(short, width - count)
        short -= missing
        steps.append((width - missing, count))
    # The text ends within the last step: one that is long enough to be cut by the surplus, and no longer than needed.
    surplus = sum(accepted) + num_drafts - (num_tokens - 1)
    cut = next((i for i, (_, count) in enumerate(steps) if count >= surplus > 0), None)
    if cut is not None:
        steps.append(steps.pop(cut))
    return steps


def _fields(params: SamplingParams) -> dict[str, Any]:
    """Our parameters under vLLM's names."""
    fields = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": params.seed,
        "max_tokens": params.max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _pairs(drafted: Sequence[int], accepted: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(drafted, accepted, strict=True))


@dataclass(frozen=True)
class _Server:
    """A vLLM server."""

    root: str
    model: str | None

    def complete(self, prompt: Sequence[int], params: SamplingParams, read_counters: bool) -> tuple[Generation, bool]:
        """One request; and whether the server reported its steps (if not, they are taken from the counters)."""
        before = self.counters() if read_counters else {}
        body = {"model": self.model, "prompt": list(prompt), "return_token_ids": True, **_fields(params)}
        answer = self.get_json("/v1/completions", body)
        choice = answer["choices"][0]
        if choice.get("token_ids") is None:
            raise ValueError(f"{self.root} returns no token ids: it is no vLLM server, or one too old for this program")
        metrics = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        reported = metrics.get("per_step_accepted") is not None
        if reported:
            steps = _pairs(metrics["per_step_drafted"], metrics["per_step_accepted"])
        else:
            steps = self.steps_since(before, len(choice["token_ids"]))
        return make_generation(prompt, choice["token_ids"], steps, choice["finish_reason"]), reported

    def steps_since(self, before: dict[str, int], num_tokens: int) -> list[tuple[int, int]]:
        """Steps of the one request that ran since `before` was read; none where the server does not speculate."""
        deadline = time.monotonic() + COUNTERS_PATIENCE_S
        while True:
            after = self.counters()
            grown = {name: after[name] - before.get(name, 0) for name in after}
            explained = grown.get("num_drafts", 0) + grown.get("num_accepted_tokens", 0)
            if not after or explained >= num_tokens - 1 or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        depth = sum(name.startswith("position ") for name in grown)
        per_position = [grown[f"position {i}"] for i in range(depth)]
        drafts = grown.get("num_drafts", 0)
        return steps_from_counters(drafts, grown.get("num_draft_tokens", 0), per_position, num_tokens)

    def counters(self) -> dict[str, int]:
        """vLLM's speculation counters, summed over engines; those per position as "position i"."""
        values: dict[str, int] = {}
        for name, labels, value in COUNTER.findall(self._read("/metrics").decode()):
            if name.endswith("_created"):
                continue
            position = POSITION.search(labels)
            key = f"position {position[1]}" if position else name
            values[key] = values.get(key, 0) + int(float(value))
        return values

    def get_json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(self._read(path, body))

    def _read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.root + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return answer.read()
        except HTTPError as error:
            raise ValueError(f"{self.root}{path} answered {error.code}: {error.read().decode()[:500]}") from error
        except URLError as error:
            raise ValueError(f"{self.root}{path} cannot be reached: {error.reason}. Is the server running?") from error
