"""Training: the blocks against the inference drafter, the loss against autograd, and a whole small run."""

import json
import math
from pathlib import Path

import block_training as bt
import drafter_trainer
import make_training_data
import numpy as np
import pytest
import torch
import train_drafter
from batched_muon import BatchedMuon
from safetensors.numpy import save_file
from torch.nn.attention.flex_attention import create_block_mask
from training_files import TrainingData, find_buckets

from dspark import load_drafter
from dspark.drafter import Drafter
from dspark.target import HFTarget

UNFUSED = "ignore:flex_attention called without torch.compile"
VOCABULARY = 272


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents of 12 to 60 tokens; some have two answers."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(3)
    tokens, answers = [], []
    for _ in range(60):
        length = int(rng.integers(24, 61))
        answer = np.ones(length, dtype=np.uint8)
        answer[: rng.integers(3, 8)] = 0
        if rng.random() < 0.3:
            answer[14:18] = 0
        tokens.append(rng.integers(4, VOCABULARY, length).astype(np.uint16))
        answers.append(answer)
    offsets = np.concatenate([[0], np.cumsum([len(document) for document in tokens])])
    save_file(
        {"tokens": np.concatenate(tokens), "answer": np.concatenate(answers), "offsets": offsets},
        folder / "shard-00000.safetensors",
    )
    shard = {
        "file": "shard-00000.safetensors",
        "documents": 60,
        "tokens": int(offsets[-1]),
        "answer_tokens": sum(int(answer.sum()) for answer in answers),
    }
    (folder / "manifest.json").write_text(
        json.dumps({"settings": {"max_length": 60}, "shards": [shard], "generation_s": 1.0})
    )
    return folder


def arguments(target_dir: Path, data_dir: Path, out: Path, *extra: str) -> list[str]:
    return [
        *("--target", str(target_dir), "--data", str(data_dir), "--out", str(out), "--device", "cpu"),
        *("--layers", "2", "--intermediate", "40", "--target-layers", "0", "2", "3", "--markov-rank", "8"),
        *("--mask-token", "3", "--batch-tokens", "256", "--bucket-step", "32", "--validation", "12", *extra),
    ]  # fmt: skip


def trainer(target_dir: Path, data_dir: Path, out: Path, *extra: str) -> tuple[drafter_trainer.Trainer, HFTarget]:
    args = train_drafter.parse_args(arguments(target_dir, data_dir, out, "--steps", "1", *extra))
    target, _ = make_training_data.load(str(target_dir), "cpu", args.dtype)
    data = TrainingData(data_dir, target.device, args.validation)
    made = drafter_trainer.Trainer(target, data, args)
    torch.manual_seed(2)
    with torch.no_grad():  # uneven norms and a Markov bias, so that a step left out shows
        for name, parameter in made.master.named_parameters():
            parameter += (
                0.2 * torch.randn_like(parameter)
                if "norm" in name or "markov_w2" in name or "confidence" in name
                else 0
            )
    made.measure_taps((64, torch.arange(4)))
    made.refresh_copy()
    return made, target


@pytest.mark.parametrize("attention", ["dense", pytest.param("sparse", marks=pytest.mark.filterwarnings(UNFUSED))])
def test_blocks_equal_drafting_after_the_same_prefix(
    target_dir: Path, data_dir: Path, tmp_path: Path, attention: str
) -> None:
    """The law of training: for every block, hidden states, corrected logits, confidence and TV are those of the
    exported drafter on that prefix alone.
    """
    made, target = trainer(target_dir, data_dir, tmp_path, "--attention", attention)
    documents = torch.tensor([0, 5, 17, 44])
    with torch.no_grad():  # flex_attention has no backward pass on a CPU
        _, blocks, outputs = made.forward((64, documents), torch.Generator().manual_seed(0))
    weights = {name: tensor.float() for name, tensor in made.master.state_dict().items()}
    weights["fc.weight"] = weights["fc.weight"] * made.tap_scale
    drafter = Drafter(made.config).eval()
    drafter.load_state_dict(weights)
    drafter.share(target.input_embedding, target.output_head, target.vocab_size)
    tokens, answer = made.data.batch(documents, 64)
    target.tap(made.config.tap_ids)
    rows = {
        name: value.view(4, 8, 8, *value.shape[1:])
        for name, value in outputs.items()
        if name in {"tv", "confidence", "hidden"}
    }
    valid = blocks.valid.view(4, 8, 8)
    for n in range(4):
        reference = target.model(tokens[n : n + 1], output_hidden_states=True)
        probs = reference.logits[0].softmax(-1)
        taps = torch.cat(
            [reference.hidden_states[tap] if tap < target.num_layers else None for tap in made.config.tap_ids[:-1]],
            dim=-1,
        )
        last = made.stack.forward(tokens[n : n + 1], made.config.tap_ids)[0][
            None, :, -48:
        ]  # Hugging Face has the last layer only after the norm
        taps = torch.cat([taps, last], dim=-1)
        for a in range(8):
            if not valid[n, a, 0]:
                continue
            s = int(blocks.positions[n, a])
            assert answer[n, s]
            cache = drafter.new_cache(1)
            drafter.extend(cache, taps[:, :s], [s])
            hidden = drafter.block_hidden(cache, tokens[n, s : s + 1])
            chosen = []

            def pick(i: int, logits: torch.Tensor, n: int = n, s: int = s, chosen: list = chosen) -> torch.Tensor:
                chosen.append(logits[0].softmax(-1))
                return tokens[n, min(s + 1 + i, 63)][None]

            confidence = drafter.chain(hidden, tokens[n, s : s + 1], 8, pick)
            torch.testing.assert_close(rows["hidden"][n, a], hidden[0], rtol=1e-3, atol=1e-4)
            for k in range(8):
                label_in_answer = s + 1 + k < 64 and bool(answer[n, s : s + 2 + k].all())
                assert bool(valid[n, a, k]) == label_in_answer
                if label_in_answer:
                    tv = 0.5 * (probs[s + k] - chosen[k]).abs().sum()
                    torch.testing.assert_close(rows["tv"][n, a, k], tv, rtol=1e-3, atol=1e-4)
                    torch.testing.assert_close(rows["confidence"][n, a, k], confidence[0, k], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has no backward pass on a CPU")
def test_sparse_and_dense_attention_give_the_same_gradients(target_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    results = []
    for attention in ("dense", "sparse"):
        flags = ("--attention", attention, "--device", "cuda", "--dtype", "float32", "--compile")
        made, _ = trainer(target_dir, data_dir, tmp_path, *flags)
        made.backward((32, torch.tensor([3, 9, 21, 30, 33, 40, 41, 42], device="cuda")))
        results.append({name: parameter.grad for name, parameter in made.master.named_parameters()})
    for name, gradient in results[0].items():
        assert gradient.abs().sum() > 0, name
        assert (results[1][name] - gradient).norm() < 1e-2 * gradient.norm(), name


@pytest.mark.parametrize(
    ("length", "num_sequences"), [(128, 8), (192, 16), (512, 3)], ids=["one-tile", "straddling", "long"]
)
def test_sparse_mask_visits_exactly_the_tiles_it_needs(length: int, num_sequences: int) -> None:
    generator = torch.Generator().manual_seed(length)
    answer = torch.rand(num_sequences, length, generator=generator) < 0.9
    tokens = torch.zeros_like(answer, dtype=torch.int64)
    blocks = bt.make_blocks(tokens, answer, bt.choose_anchors(answer, length // 8, generator), 8, 3)
    num_rows = length * num_sequences
    mask = bt.SparseMask(num_rows, num_rows, 8, torch.device("cpu"))
    built = mask.build(blocks, length)
    reference = create_block_mask(mask.visible, 1, 1, num_rows, 2 * num_rows, device="cpu", BLOCK_SIZE=bt.TILE)
    assert torch.equal(built.to_dense(), reference.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(built, name), getattr(reference, name)), name
    dense = bt.dense_mask(blocks, length, 8)[:, 0]
    row, key = torch.arange(num_rows)[:, None], torch.arange(2 * num_rows)
    visible = mask.visible(None, None, row, key)
    for n in range(num_sequences):
        own = slice(n * length, (n + 1) * length)
        assert torch.equal(
            torch.cat([visible[own, own], visible[own, num_rows + n * length : num_rows + (n + 1) * length]], dim=1),
            dense[n],
        )
    assert int(visible.sum()) == int(dense.sum())


def test_vocabulary_loss_has_the_gradients_of_its_definition() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, embedded = (
        torch.randn(20, size, generator=generator, dtype=torch.float64).requires_grad_() for size in (6, 3)
    )
    w2 = torch.randn(11, 3, generator=generator, dtype=torch.float64).requires_grad_()
    target_hidden, head = (
        torch.randn(9, 6, generator=generator).double(),
        torch.randn(11, 6, generator=generator).double(),
    )
    target_rows, labels = torch.randint(9, (20,), generator=generator), torch.randint(11, (20,), generator=generator)
    weights = torch.rand(20, generator=generator).double()
    scratch = torch.cat([head, torch.full((11, 3), math.nan, dtype=torch.float64)], dim=1)
    rows = (target_rows, labels, weights)
    loss, tv = bt.VocabularyLoss.apply(hidden, embedded, w2, target_hidden, scratch, rows, bt.row_gradients)
    actual = torch.autograd.grad(3 * loss, (hidden, embedded, w2))
    q = (hidden @ head.T + embedded @ w2.T).softmax(-1)
    distance = 0.5 * ((target_hidden @ head.T).softmax(-1)[target_rows] - q).abs().sum(-1)
    expected_loss = (weights * (0.1 * -q.gather(1, labels[:, None])[:, 0].log() + 0.9 * distance)).sum()
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(tv, distance)
    for gradient, expected in zip(actual, torch.autograd.grad(3 * expected_loss, (hidden, embedded, w2)), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_row_weights_decay_and_sum_to_one() -> None:
    valid = torch.tensor([True] * 8 + [True, True] + [False] * 6)
    weights = bt.row_weights(valid, 8)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    torch.testing.assert_close(weights[4] / weights[0], torch.tensor(math.exp(-1)))
    assert weights[8] == weights[0]
    assert not weights[10:].any()


def test_batched_muon_equals_the_one_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in [(6, 6), (6, 6), (12, 6), (6, 30)]]
    ours, theirs = ([torch.nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    mine = BatchedMuon(ours, lr=0.02, weight_decay=0.01)
    oracle = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = torch.randn(a.shape, generator=generator)
        mine.step()
        oracle.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # one rounding of bfloat16 on updates of 0.1


def test_every_document_is_in_an_epoch_and_none_is_cut(data_dir: Path) -> None:
    data = TrainingData(data_dir, torch.device("cpu"), 12)
    buckets = find_buckets(256, 16, 60)
    assert buckets == [16, 32, 64]
    batches = data.batches(data.training, buckets, 256, [1, 0])
    assert {int(document) for _, ids in batches for document in ids} == set(range(12, 60))
    for length, ids in batches:
        assert len(ids) * length == 256
        assert data.host_lengths[ids].max() <= length
    with pytest.raises(ValueError, match="batch-tokens"):
        find_buckets(256, 48, 300)


def test_a_run_learns_stops_resumes_and_leaves_a_loadable_drafter(
    target_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    assert train_drafter.main(arguments(target_dir, data_dir, straight, "--steps", "30", "--lr", "5e-3")) == 0
    command = arguments(target_dir, data_dir, halves, "--steps", "30", "--lr", "5e-3")
    assert train_drafter.main([*command, "--stop-after", "0"]) == 0
    record = json.loads((halves / "training.json").read_text())
    assert record["steps"] == 1
    assert not record["complete"]
    for flags, message in (
        (["--lr", "1e-3"], r"--lr: stored 0\.005, now 0\.001\. Give"),
        (["--steps", "40", "--seed", "9"], "--steps: stored 30, now 40; --seed: stored"),
    ):
        with pytest.raises(ValueError, match=message):
            train_drafter.main([*command, "--resume", *flags])
    assert train_drafter.main([*command, "--resume"]) == 0
    record = json.loads((halves / "training.json").read_text())
    assert record["steps"] == 30
    assert record["complete"]
    log = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < record["validation"][0]["loss"]
    target = HFTarget.from_pretrained(str(target_dir))
    drafters = [load_drafter(folder, target=target) for folder in (straight, halves)]
    for (name, one), other in zip(drafters[0].named_parameters(), drafters[1].parameters(), strict=True):
        assert torch.equal(one, other), name
    assert drafters[0].config.tap_ids == (1, 3, 4)
    assert drafters[0].config.anchor_first
    with pytest.raises(ValueError, match="no checkpoint"):
        train_drafter.main(arguments(target_dir, data_dir, tmp_path / "none", "--steps", "3", "--resume"))


def test_bfloat16_training_runs(target_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    command = arguments(target_dir, data_dir, tmp_path, "--steps", "3", "--dtype", "bfloat16", "--optimizer", "adamw")
    assert train_drafter.main(command) == 0
    figures = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert 1 <= figures["tokens_per_step"] <= 9
    assert all(0 <= value <= 1 for value in figures["accept_by_position"])
