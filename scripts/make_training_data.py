"""Let a target write conversations: the training data of its drafter.

    python scripts/make_training_data.py --target default --out /tmp/data --minutes 3.7 --device cuda
    python scripts/make_training_data.py --target MODEL_DIR --out /tmp/data --tokens 20000 --rows 16 --max-length 96

Every document is a *script*: forced tokens (chat template, templated request) and places where the target samples until
its stop token (`prompts.py`). A fixed number of rows decodes in step, one token each a step; a row whose document ended
starts the next one in the step after, so no row waits and no shape changes, and one step is one CUDA graph. The noise
is a hash of (seed, document, position, token): a document's text does not depend on what ran beside it.

Output: DIR/shard-NNNNN.safetensors (tokens, answer mask, offsets; see `write_shard`) and DIR/manifest.json. Documents
enter shards in order, so a run that is started again goes on behind its last shard.

Cost of a token of SmolLM2-135M at 300 cached positions: 0.27 GFLOP and, in bfloat16, 6.9 MB of cache. Reading the cache
bounds it: 4 TB/s would allow 580k tokens/s.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from decode_attention import SETTINGS, decode_attention, decode_attention_ref, fastest_setting
from prompts import ANSWER, END, USER, ScriptWriter
from safetensors.numpy import save_file
from target_stack import TargetStack
from training_files import MANIFEST

from dspark.default import load_target, resolve_default_target
from dspark.target import HFTarget

USER_TURN_MIN_P = 0.02  # keeps invented requests readable; answers are sampled from the whole distribution
MIN_ANSWER_TOKENS = 9  # a document with fewer has no room for one block behind an anchor
STEPS_PER_CHECK = 64
# A small target that does not sample at temperature 1 tends to repeat itself until it is stopped: such a document is
# cut after so many tokens behind what its script forces.
COOL_SAMPLED_TOKENS = 320


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Murmur3's 32-bit finaliser on int32 (which wraps); each shift is masked because int32 shifts keep the sign."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


def sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Draw one token a row by the Gumbel race; at temperature 0 the same formula is the argmax.

    Args:
        logits: [B, V].
        temperature: [B] float32.
        min_p: [B] float32, tokens below this share of the likeliest one's probability are left out; 0 keeps all.
        key: [B] int32, what the row's noise is a hash of.

    Returns:
        [B] int64.
    """
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    bits = _mix(_mix(tokens * -1640531527 ^ key[:, None]) + key[:, None])
    # 23 bits and a half: the largest value stays below 1 in float32, so that no noise is infinite
    uniform = ((bits & 0x7FFFFF).float() + 0.5) * 2.0**-23
    scores = logits.float()
    floor = scores.amax(dim=-1, keepdim=True) + (temperature * min_p.log())[:, None].nan_to_num(nan=-math.inf)
    race = (-uniform.log()).clamp_min(2.0**-25)  # an approximate log may give 0 just below 1
    noisy = scores - temperature[:, None] * race.log()
    return torch.where(scores >= floor, noisy, -math.inf).argmax(dim=-1)


class Writer:
    """B rows that decode scripts; all state is on the device, and the host looks at it every STEPS_PER_CHECK steps."""

    def __init__(
        self, stack: TargetStack, stop_ids: tuple[int, ...], args: argparse.Namespace, first_document: int
    ) -> None:
        """Allocate caches for `args.rows` rows of `args.max_length` and script space for `args.documents` documents."""
        self.stack, self.length, self.seed = stack, args.max_length, args.seed
        device, rows, space = stack.device, args.rows, args.documents
        self.first_document = first_document
        integers: dict[str, Any] = {"dtype": torch.int64, "device": device}
        # The last slot is where rows without a document idle: its script ends at once.
        self.scripts = torch.full((space + 1, args.max_script), END, dtype=torch.int32, device=device)
        self.scripts[space, 0] = 0
        self.temperatures = torch.zeros(space + 1, device=device)
        self.limits = torch.full((space + 1,), self.length, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(space + 1, self.length, dtype=torch.int32, device=device)
        self.kinds = torch.zeros(space + 1, self.length, dtype=torch.uint8, device=device)
        self.lengths = torch.zeros(space + 1, **integers)
        self.available = torch.zeros((), **integers)
        self.next_document = torch.zeros((), **integers)
        self.is_stop = torch.zeros(stack.embedding.shape[0], dtype=torch.bool, device=device)
        self.is_stop[list(stop_ids)] = True
        self.document = torch.full((rows,), space, **integers)
        self.current = torch.zeros(rows, **integers)
        self.pointer = torch.ones(rows, **integers)
        self.positions = torch.zeros(rows, dtype=torch.int32, device=device)
        shape = (rows, stack.kv_heads, self.length, stack.head_dim)
        self.caches = [
            (torch.zeros(shape, dtype=stack.dtype, device=device), torch.zeros(shape, dtype=stack.dtype, device=device))
            for _ in range(stack.num_layers)
        ]
        self.tables = stack.rotary_tables(self.length)
        self.attention: Callable[..., torch.Tensor] = decode_attention_ref
        self.sample: Callable[..., torch.Tensor] = (
            torch.compile(sample_tokens, dynamic=False) if args.compile else sample_tokens
        )
        if args.attention == "triton":
            setting, timings = SETTINGS[0], "not timed"
            if device.type == "cuda":
                setting, timings = fastest_setting(self.caches[0], stack.heads)
            print(f"decode attention: {setting} of {timings}", flush=True)
            self.attention = lambda *inputs: decode_attention(*inputs, setting)

    def add_scripts(self, scripts: list[tuple[list[int], float]]) -> None:
        """Queue documents behind those already queued."""
        start = int(self.available)
        padded = np.full((len(scripts), self.scripts.shape[1]), END, dtype=np.int32)
        limits = np.full(len(scripts), self.length, dtype=np.int32)
        for row, (entries, temperature) in enumerate(scripts):
            padded[row, : len(entries)] = entries
            if temperature < 1:
                limits[row] = min(len(entries) + COOL_SAMPLED_TOKENS, self.length)
        stop = start + len(scripts)
        self.scripts[start:stop] = torch.from_numpy(padded).to(self.scripts.device)
        self.limits[start:stop] = torch.from_numpy(limits).to(self.scripts.device)
        self.temperatures[start:stop] = torch.tensor([temperature for _, temperature in scripts]).to(
            self.scripts.device
        )
        self.available.fill_(stop)

    @torch.no_grad()
    def step(self) -> None:
        """Decode one token in every row."""
        tables = (self.tables[0][self.positions], self.tables[1][self.positions])
        x = F.embedding(self.current, self.stack.embedding)
        for index in range(self.stack.num_layers):
            x = self.stack.layer(index, x, tables, self._attend)
        entry = self.scripts[self.document, self.pointer]
        key = _mix(_mix((self.document + self.first_document).int() * 668265263 + self.seed) + self.positions)
        answering = entry != USER
        temperature = self.temperatures[self.document].masked_fill(~answering, 1.0)
        min_p = (~answering).float() * USER_TURN_MIN_P
        sampled = self.sample(F.linear(self.stack.final(x), self.stack.head), temperature, min_p, key)
        self._advance(entry, sampled)

    def _attend(self, index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.attention(queries, keys, values, self.caches[index], self.positions)

    def _advance(self, entry: torch.Tensor, sampled: torch.Tensor) -> None:
        """Record the next token of every row; rows whose document ended take the next one in the queue."""
        is_sampled = entry < 0
        token = torch.where(is_sampled, sampled, entry.long())
        self.pointer += ~is_sampled | self.is_stop[token]
        self.positions += 1
        place = (self.document, self.positions.long())
        self.tokens[place] = token.int()
        self.kinds[place] = (-entry).clamp_min(0).to(torch.uint8)  # USER and ANSWER as 1 and 2, forced tokens as 0
        self.lengths[self.document] = self.positions.long() + 1
        idle = self.lengths.shape[0] - 1
        ended = (
            (self.scripts[self.document, self.pointer] == END)
            | (self.positions + 1 >= self.limits[self.document])
            | (self.document == idle)
        )
        taken = self.next_document + ended.cumsum(0) - 1
        self.next_document.copy_(torch.minimum(self.next_document + ended.sum(), self.available))
        self.document.copy_(torch.where(ended, taken.masked_fill(taken >= self.available, idle), self.document))
        self.pointer.masked_fill_(ended, 1)
        self.positions.masked_fill_(ended, 0)
        self.current.copy_(torch.where(ended, self.scripts[self.document, 0].long(), token))
        self.tokens[self.document, self.positions.long()] = self.current.int()

    def progress(self) -> tuple[int, int, int, int]:
        """Synchronises. Documents queued and started, the oldest that is still being written, and tokens so far."""
        idle = self.lengths.shape[0] - 1
        started = int(self.next_document)
        oldest = min(int(self.document.min()), started)
        return int(self.available), started, oldest, int(self.lengths[:idle].sum())


def write_shard(writer: Writer, first: int, last: int, path: Path) -> dict[str, Any]:
    """Store documents [first, last) of the queue, without those that hold too few answer tokens; returns the manifest's
    entry.

    Tensors: `tokens` uint16 (int32 from 65,536 tokens of vocabulary on) and `answer` uint8 (1 = sampled as part of an
    answer) of all documents end to end; `offsets` int64, document i is offsets[i]:offsets[i + 1].
    """
    lengths = writer.lengths[first:last].cpu().numpy()
    tokens, answer = writer.tokens[first:last].cpu().numpy(), writer.kinds[first:last].cpu().numpy() == -ANSWER
    written = np.arange(tokens.shape[1]) < lengths[:, None]
    answer &= written
    kept = answer.sum(axis=1) >= MIN_ANSWER_TOKENS
    inside = written[kept]
    narrow = np.uint16 if writer.is_stop.shape[0] <= 1 << 16 else np.int32
    arrays = {
        "tokens": tokens[kept][inside].astype(narrow),
        "answer": answer[kept][inside].astype(np.uint8),
        "offsets": np.concatenate([[0], np.cumsum(lengths[kept])]).astype(np.int64),
    }
    scratch = path.with_suffix(".tmp")
    save_file(arrays, scratch)
    scratch.replace(path)
    return {
        "file": path.name,
        "first_document": writer.first_document + first,
        "last_document": writer.first_document + last,
        "documents": int(kept.sum()),
        "tokens": len(arrays["tokens"]),
        "answer_tokens": int(arrays["answer"].sum()),
    }


class Corpus:
    """The output folder: shards, and a manifest that names them."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Open a folder for writing.

        Raises:
            ValueError: it holds shards that were made with other settings.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.manifest: dict[str, Any] = {"settings": settings, "shards": [], "generation_s": 0.0}
        if (folder / MANIFEST).exists():
            self.manifest = json.loads((folder / MANIFEST).read_text())
            if self.manifest["settings"] != settings:
                raise ValueError(
                    f"{folder} was made with {self.manifest['settings']}, not {settings}: "
                    "name another folder with --out"
                )

    @property
    def num_documents(self) -> int:
        """Documents written or dropped so far; the next run starts there."""
        shards = self.manifest["shards"]
        return shards[-1]["last_document"] if shards else 0

    @property
    def num_tokens(self) -> int:
        """Tokens stored so far."""
        return sum(shard["tokens"] for shard in self.manifest["shards"])

    def add(self, writer: Writer, first: int, last: int, elapsed_s: float) -> None:
        """Write one shard, then name it in the manifest."""
        path = self.folder / f"shard-{len(self.manifest['shards']):05d}.safetensors"
        self.manifest["shards"].append(write_shard(writer, first, last, path))
        self.manifest["generation_s"] = round(self.manifest["generation_s"] + elapsed_s, 1)
        scratch = self.folder / (MANIFEST + ".tmp")
        scratch.write_text(json.dumps(self.manifest, indent=1) + "\n")
        scratch.replace(self.folder / MANIFEST)


def stepper(writer: Writer, use_graph: bool) -> Callable[[], None]:
    """The step as one callable: a replayed CUDA graph, after real steps that compile everything it launches."""
    for _ in range(3):
        writer.step()
    if not use_graph:
        return writer.step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer.step()
    return graph.replay


def generate(writer: Writer, corpus: Corpus, scripts: ScriptWriter, args: argparse.Namespace) -> None:
    """Write documents until a budget is spent; then store what there is, documents in progress cut where they stand."""
    with ThreadPoolExecutor(1) as pool:

        def prepare(start: int) -> Future[list[tuple[list[int], float]]]:
            stop = min(start + args.shard, args.documents)
            return pool.submit(lambda: [scripts(writer.first_document + index) for index in range(start, stop)])

        pending = prepare(0)
        while int(writer.available) < min(args.rows + args.shard, args.documents):
            writer.add_scripts(pending.result())
            pending = prepare(int(writer.available))
        step = stepper(writer, use_graph=writer.stack.device.type == "cuda" and args.graph)
        begin = stored_at = printed_at = time.perf_counter()
        stored, printed_tokens = 0, writer.progress()[3]
        while True:
            for _ in range(STEPS_PER_CHECK):
                step()
            available, started, oldest, tokens = writer.progress()
            now = time.perf_counter()
            if now - printed_at > args.print_every:
                rate = (tokens - printed_tokens) / (now - printed_at)
                print(
                    f"{now - begin:6.1f} s  {tokens / 1e6:8.2f} M tokens  {started:7d} documents  "
                    f"{rate / 1e3:7.1f} k tokens/s",
                    flush=True,
                )
                printed_at, printed_tokens = now, tokens
            done = now - begin > 60 * args.minutes or tokens >= args.tokens or (oldest == available == args.documents)
            while stored < (started if done else oldest - args.shard + 1):
                last = min(stored + args.shard, started)
                corpus.add(writer, stored, last, now - stored_at)
                stored, stored_at = last, now
            if done:
                break
            if available - started < 2 * args.rows and available < args.documents:
                writer.add_scripts(pending.result())
                pending = prepare(int(writer.available))
        pending.cancel()
    total = time.perf_counter() - begin
    print(
        f"{tokens} tokens in {total:.1f} s: {tokens / total / 1e3:.1f} k tokens/s, {corpus.num_tokens} stored in "
        f"{corpus.folder}",
        flush=True,
    )


def load(target: str, device: str, dtype: str = "auto") -> tuple[HFTarget, str]:
    """The target, by "auto" in bfloat16 on a GPU and float32 on a CPU, and where it came from in words."""
    location = resolve_default_target(None if target == "default" else target)
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
    return load_target(location, dtype=getattr(torch, dtype), device=device), location.source


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags; the defaults fill one 141 GB GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default", help='"default", a Hugging Face folder or a GGUF file')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time, start-up not counted")
    parser.add_argument("--tokens", type=float, default=math.inf, help="stop after this many tokens of this run")
    parser.add_argument("--documents", type=int, default=400_000, help="space for this many documents in this run")
    parser.add_argument("--rows", type=int, default=4096, help="documents written at a time")
    parser.add_argument("--shard", type=int, default=8192, help="documents a file")
    parser.add_argument("--max-length", type=int, default=640, help="positions a document may have")
    parser.add_argument("--max-script", type=int, default=320, help="forced tokens a document may have")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attention", choices=["triton", "torch"], default=None, help="default: triton on a GPU")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="default: on a GPU")
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True, help="one CUDA graph a step")
    parser.add_argument("--print-every", type=float, default=10.0, help="seconds between progress lines")
    args = parser.parse_args(argv)
    on_gpu = args.device.startswith("cuda")
    args.attention = args.attention or ("triton" if on_gpu else "torch")
    args.compile = on_gpu if args.compile is None else args.compile
    if args.max_script > args.max_length:
        parser.error(
            f"--max-script {args.max_script} exceeds --max-length {args.max_length}: such a document has no room for "
            "an answer"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    args = parse_args(argv)
    begin = time.perf_counter()
    target, source = load(args.target, args.device)
    stack = TargetStack(target, compile=args.compile)
    settings = {"target": source, "vocab_size": target.vocab_size, "dtype": str(stack.dtype).removeprefix("torch.")}
    settings |= {"seed": args.seed, "max_length": args.max_length, "max_script": args.max_script}
    corpus = Corpus(args.out, settings)
    scripts = ScriptWriter(target.tokenizer, args.seed, args.max_script)
    writer = Writer(stack, target.stop_token_ids, args, corpus.num_documents)
    print(
        f"{source}; started in {time.perf_counter() - begin:.1f} s, first document {corpus.num_documents}", flush=True
    )
    generate(writer, corpus, scripts, args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
