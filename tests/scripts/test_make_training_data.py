"""Data generation: its decoding step against Hugging Face, its noise, and its files."""

import json
from pathlib import Path

import make_training_data
import numpy as np
import pytest
import torch
from decode_attention import decode_attention, decode_attention_ref
from make_training_data import Writer, main, parse_args, sample_tokens
from prompts import ANSWER, USER, ScriptWriter
from safetensors.numpy import load_file
from target_stack import TargetStack

from dspark.target import HFTarget

FORCED = [[1, 7, 9, 30, 31, 2, 5], [1, 8, 8, 120]]


@pytest.fixture(scope="module")
def target(target_dir: Path) -> HFTarget:
    return make_training_data.load(str(target_dir), "cpu")[0]


def arguments(tmp_path: Path, *extra: str) -> list[str]:
    return ["--out", str(tmp_path), "--device", "cpu", "--max-length", "48", "--max-script", "40", *extra]


def decode(
    target: HFTarget,
    tmp_path: Path,
    scripts: list[tuple[list[int], float]],
    rows: int = 2,
    steps: int = 90,
    stop_ids: tuple[int, ...] = (2,),
) -> Writer:
    args = parse_args(arguments(tmp_path, "--rows", str(rows), "--documents", str(len(scripts))))
    writer = Writer(TargetStack(target, compile=False), stop_ids, args, first_document=0)
    writer.add_scripts(scripts)
    for _ in range(steps):
        writer.step()
    return writer


def test_greedy_documents_equal_hugging_face_generation(target: HFTarget, tmp_path: Path) -> None:
    # two rows of different prompt lengths, then a third document that takes over the row that ends first
    scripts = [([*forced, ANSWER], 0.0) for forced in [*FORCED, [1, 44, 45, 46]]]
    writer = decode(target, tmp_path, scripts)
    for document, (script, _) in enumerate(scripts):
        expected = target.model.generate(torch.tensor([script[:-1]]), do_sample=False, max_length=48, eos_token_id=2)
        length = int(writer.lengths[document])
        assert writer.tokens[document, :length].tolist() == expected[0].tolist()
        assert (writer.kinds[document, :length] == -ANSWER).tolist() == [t >= len(script) - 1 for t in range(length)]


def test_step_logits_equal_hugging_face(target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        make_training_data, "sample_tokens", lambda logits, *rest: seen.append(logits) or sample_tokens(logits, *rest)
    )
    writer = decode(target, tmp_path, [([*FORCED[0], ANSWER], 1.0), ([*FORCED[1], ANSWER], 1.0)], steps=20)
    for row in range(2):
        length = min(int(writer.lengths[row]), 19)
        expected = target.model(writer.tokens[row : row + 1, :length].long()).logits[0]
        actual = torch.stack(
            [logits[row] for logits in seen[1 : length + 1]]
        )  # the first step only hands out documents
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_documents_do_not_depend_on_their_neighbours(target: HFTarget, tmp_path: Path) -> None:
    scripts = [([1, 20 + n, ANSWER, 9, USER, 11, ANSWER], 1.0) for n in range(6)]
    alone, together = (
        decode(target, tmp_path, scripts, rows=1, steps=300),
        decode(target, tmp_path, scripts, rows=4, steps=300),
    )
    assert torch.equal(alone.lengths, together.lengths)
    assert torch.equal(alone.tokens[:-1], together.tokens[:-1])
    assert int(alone.lengths[:-1].min()) > 6


def test_turns_end_at_the_stop_token_and_then_follow_the_script(target: HFTarget, tmp_path: Path) -> None:
    script, stop_ids = [1, 4, ANSWER, 77, 78, USER, 79, ANSWER], tuple(range(2, 40))  # many, so that turns are short
    writer = decode(target, tmp_path, [(script, 1.0)] * 40, rows=8, steps=300, stop_ids=stop_ids)
    complete = 0
    columns = (writer.tokens[:-1].tolist(), writer.kinds[:-1].tolist(), writer.lengths[:-1].tolist())
    for tokens, kinds, length in zip(*columns, strict=True):
        runs = [kind for position, kind in enumerate(kinds[:length]) if position == 0 or kind != kinds[position - 1]]
        assert runs == [0, 2, 0, 1, 0, 2][: len(runs)]
        for position in range(1, length):
            if kinds[position] != kinds[position - 1] and kinds[position - 1]:
                assert tokens[position - 1] in stop_ids
        assert length == 48 or tokens[length - 1] in stop_ids
        complete += len(runs) == 6
    assert complete > 0


def test_sampling_follows_the_distribution() -> None:
    # chi-square over 8 tokens, 40,000 draws; the bound is passed by chance once in a million seeds, and the seed is
    # fixed
    logits = torch.randn(8, generator=torch.Generator().manual_seed(0)).expand(40_000, 8)
    key = torch.arange(40_000, dtype=torch.int32) * 7919
    for temperature in (0.6, 1.0):
        probs = (logits[0] / temperature).softmax(-1)
        drawn = sample_tokens(logits, torch.full((40_000,), temperature), torch.zeros(40_000), key)
        counts = drawn.bincount(minlength=8)
        assert float(((counts - 40_000 * probs) ** 2 / (40_000 * probs)).sum()) < 40.5
    greedy = sample_tokens(logits, torch.zeros(40_000), torch.zeros(40_000), key)
    assert (greedy == logits[0].argmax()).all()


def test_min_p_leaves_out_unlikely_tokens() -> None:
    logits = torch.tensor([[0.0, -3.0, -5.0]]).expand(20_000, 3)
    drawn = sample_tokens(
        logits, torch.ones(20_000), torch.full((20_000,), 0.02), torch.arange(20_000, dtype=torch.int32)
    )
    assert set(drawn.unique().tolist()) == {0, 1}


@pytest.mark.parametrize("num_slots", [32, 130], ids=["one-block", "uneven-blocks"])
def test_attention_kernel_equals_its_reference(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available() and __import__("os").environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(5, heads, 16, generator=generator).to(device) for heads in (6, 2, 2))
    caches = [tuple(torch.randn(5, 2, num_slots, 16, generator=generator).to(device) for _ in range(2))]
    caches.append(tuple(cache.clone() for cache in caches[0]))
    positions = torch.tensor([0, 1, 31, num_slots // 2, num_slots - 1], dtype=torch.int32, device=device)
    expected = decode_attention_ref(queries, keys, values, caches[0], positions)
    actual = decode_attention(queries, keys, values, caches[1], positions)
    torch.testing.assert_close(
        actual, expected, rtol=2e-3 if device == "cuda" else 1e-5, atol=2e-3 if device == "cuda" else 1e-5
    )
    for written, reference in zip(caches[1], caches[0], strict=True):
        assert torch.equal(written, reference)


def test_a_run_is_resumed_behind_its_last_shard(target_dir: Path, tmp_path: Path) -> None:
    command = ["--target", str(target_dir), *arguments(tmp_path, "--rows", "4", "--shard", "5"), "--max-script", "260"]
    command += ["--max-length", "280"]
    assert main([*command, "--documents", "12"]) == 0
    first = json.loads((tmp_path / "manifest.json").read_text())
    assert [(shard["first_document"], shard["last_document"]) for shard in first["shards"]] == [
        (0, 5),
        (5, 10),
        (10, 12),
    ]
    assert main([*command, "--documents", "3"]) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["shards"][:3] == first["shards"]
    assert manifest["shards"][3]["first_document"] == 12
    for shard in manifest["shards"]:
        arrays = load_file(tmp_path / shard["file"])
        assert arrays["tokens"].dtype == np.uint16
        assert len(arrays["tokens"]) == len(arrays["answer"]) == arrays["offsets"][-1] == shard["tokens"]
        assert len(arrays["offsets"]) == shard["documents"] + 1
    with pytest.raises(ValueError, match="was made with"):
        main([*command, "--documents", "3", "--seed", "9"])


def test_scripts_are_a_function_of_seed_and_document(target: HFTarget) -> None:
    scripts = [ScriptWriter(target.tokenizer, seed=4, max_script=600)(document) for document in range(60)]
    again = ScriptWriter(target.tokenizer, seed=4, max_script=600)
    assert [again(document) for document in range(60)] == scripts
    assert len({tuple(entries) for entries, _ in scripts}) > 30
    opening = target.tokenizer("<|im_start|>user\n", add_special_tokens=False).input_ids
    for entries, temperature in scripts:
        assert entries[-1] == ANSWER
        assert entries[: len(opening)] == opening
        assert temperature in {0.0, 0.6, 1.0}
        for place, entry in enumerate(entries[:-1]):
            if entry < 0:  # the template goes on behind the stop token that ends the sampled turn
                assert target.tokenizer.decode(entries[place + 1]) == "\n"


def test_every_request_fills_its_slots() -> None:
    import random

    from prompts import CHAT, MATH, STUB_FORMS, fill, request, stub

    rng = random.Random(0)
    texts = [fill(template, rng) for template in MATH + CHAT] + [request(rng) for _ in range(3000)]
    assert not [text for text in texts if "{name" in text or "{task" in text or "{stub" in text]
    assert len(set(texts)) > 2500
    for _ in range(300):
        compile(stub(rng), "stub", "exec")
    assert all("{stub}" in form for form in STUB_FORMS)
