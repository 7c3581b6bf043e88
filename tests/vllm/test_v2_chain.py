"""The V2 speculator drafts the very tokens of the library's drafter, from the q that it stores for verification."""

import shutil

import pytest
import torch
from v2_engine import Step, fill_buffers, load_speculator, make_config, one_process, without_v1_checks

from dspark import load_drafter
from dspark.checkpoint import check_files, stored_head_digest
from dspark.confidence import CALIBRATION_FILE, ConfidenceCalibration, Scaling, write_calibration
from dspark.families import Findings
from dspark.families.container import open_container
from dspark.sampling import (
    Purpose,
    SamplingParams,
    SamplingTensors,
    Streams,
    draft_token,
    sample,
    to_distribution,
)
from dspark.schedule import step_positions
from dspark.vllm import v2_models
from dspark.vllm.v1 import served_target
from dspark.vllm.v2_models import stored_drafter

STEP = Step(
    slots=[6, 2, 7],
    anchor_positions=[10, 20, 33],
    anchors=[11, 5, 200],
    temperatures=[0.0, 0.7, 1.3],
    seeds=[5, -7, 2**61 + 3],
)
PADDED = 5
UNTOUCHED = -9

FULL = {"packaging": "speculators", "transformer_layer_config__layer_types": ["full_attention"] * 2}
HEADS = [
    pytest.param({}, id="vanilla"),
    pytest.param({"markov_head_type": "gated"}, id="gated"),
    pytest.param({"markov_head_type": "rnn"}, id="rnn"),
    pytest.param({"markov_head_type": "rnn", "sample_from_anchor": False, "block_size": 5}, id="rnn-1+N"),
    pytest.param({"markov_rank": 0, "confidence_head_with_markov": False}, id="no-markov-head"),
    pytest.param(FULL, id="reduced-1+N"),
    pytest.param({"markov_head_type": "gated"} | FULL, id="reduced-gated-1+N"),
]


@pytest.fixture
def loaded(target, drafter, tmp_path, monkeypatch):
    """loaded(changes, speculative, **options): speculator, and the library's drafter of the same files."""
    without_v1_checks(monkeypatch)
    contexts = []

    def make(changes, speculative, prepare=None, **options):
        path = drafter(changes.get("packaging", "deepspec"), **{k: v for k, v in changes.items() if k != "packaging"})
        if prepare is not None:
            path = shutil.copytree(path, tmp_path / "drafter")
            prepare(path)
        config = make_config(target, path, speculative, **options)
        context = one_process(config, tmp_path / "store")
        context.__enter__()
        contexts.append(context)
        speculator, target_model = load_speculator(config)
        library = load_drafter(path, target=served_target(target_model, config), dtype=torch.float32)
        return speculator, library

    yield make
    for context in contexts:
        context.__exit__(None, None, None)


def run(speculator, step=STEP):
    """Head hidden states [R, rows, H] of a random block, drafted."""
    generator = torch.Generator().manual_seed(1)
    rows = speculator.num_query_per_req
    hidden = torch.randn(PADDED * rows, 32, generator=generator)
    fill_buffers(speculator, step)
    speculator.draft_tokens.fill_(UNTOUCHED)
    speculator._sample_sequential(PADDED, hidden)
    return hidden.view(PADDED, rows, -1)[: len(step.slots)]


def draw_by_token_id(logits, sampling, streams, positions, drafting, ids):
    """As `draft_token`, with the numbers of target ids: the draw from candidates."""
    probs = to_distribution(logits, sampling)
    columns = None if ids is None else ids.expand_as(probs)[:, None]
    return sample(probs[:, None], streams, positions[:, None], Purpose.DRAFT, columns)[:, 0], probs


def library_chain(library, hidden, step, drafting="probabilistic", draw=draft_token, noise_positions=None):
    """Tokens [R, K], q [R, K, V] over target ids, and confidence logits of the library."""
    sampling = SamplingTensors.stack([SamplingParams(temperature=t) for t in step.temperatures])
    streams = Streams(torch.tensor(step.seeds))
    if noise_positions is None:
        noise_positions = torch.tensor(step.anchor_positions)[:, None] + torch.arange(1, 5)
    ids, tokens, rows = library.draft_ids(), [], []
    columns = torch.arange(library.target_vocab_size) if ids is None else ids

    def pick(i, logits):
        visible = logits if ids is not None else logits[:, : library.target_vocab_size]
        token, q = draw(visible, sampling, streams, noise_positions[:, i], drafting, ids)
        dense = torch.zeros(len(step.slots), library.target_vocab_size)
        dense[:, columns] = (
            torch.nn.functional.one_hot(visible.argmax(-1), visible.shape[1]).float() if q is None else q
        )
        tokens.append(token)
        rows.append(dense)
        return token

    confidence = library.chain(hidden, torch.tensor(step.anchors), 4, pick)
    return torch.stack(tokens, 1), torch.stack(rows, 1), confidence


def stored_q(speculator, step=STEP):
    """[R, K, V] from the store, as verification computes it; greedy rows are left out of comparisons."""
    store, temperature = speculator.store, torch.tensor(step.temperatures).clamp_min(1e-3)[:, None, None]
    if store.ids is None:
        return (store.logits[list(step.slots)] / temperature - store.logsumexp[list(step.slots)][..., None]).exp()
    values = (store.values[list(step.slots)] / temperature).softmax(-1)
    dense = torch.zeros(len(step.slots), values.shape[1], 259)
    return dense.scatter_(-1, store.ids[list(step.slots)], values)


@pytest.mark.parametrize("changes", HEADS)
def test_drafts_and_q_are_the_librarys(changes, loaded):
    speculator, library = loaded(changes, {"draft_sample_method": "probabilistic"})
    hidden = run(speculator)
    tokens, q, _ = library_chain(library, hidden, STEP)
    assert speculator.draft_tokens[:3].tolist() == tokens.tolist()
    assert (stored_q(speculator) - q)[1:].abs().max() < 2e-6
    assert (speculator.draft_tokens[3:] == UNTOUCHED).all(), "padding rows were written"
    unused = [slot for slot in range(8) if slot not in STEP.slots]
    assert speculator.store.logits[unused].isneginf().all()


@pytest.mark.parametrize("changes", [{}, HEADS[5].values[0]], ids=["whole", "reduced"])
def test_greedy_drafting_keeps_no_q(changes, loaded):
    speculator, library = loaded(changes, {"draft_sample_method": "greedy"})
    hidden = run(speculator)
    tokens, _, _ = library_chain(library, hidden, STEP, "greedy")
    assert speculator.draft_tokens[:3].tolist() == tokens.tolist()
    assert speculator.draft_logits is None, "this is how vLLM marks one-hot proposals"


@pytest.mark.parametrize("changes", [{}, HEADS[6].values[0]], ids=["whole", "reduced-gated"])
def test_candidates_of_each_row(changes, loaded):
    """With as many candidates as matter, top-k drafting has the q of drafting; the dense cache is gone."""
    options = {"draft_sample_method": "probabilistic", "dspark_draft_topk": 16}
    speculator, library = loaded(changes, options)
    hidden = run(speculator)
    first = library.config.first_draft_row
    base = library.base_logits(hidden[:, first : first + 4])
    kept = base >= base.topk(16, dim=-1).values[..., -1:]
    full, library.base_logits = library.base_logits, lambda rows: full(rows).masked_fill(~kept, float("-inf"))
    tokens, q, _ = library_chain(library, hidden, STEP, draw=draw_by_token_id)
    assert speculator.draft_tokens[:3].tolist() == tokens.tolist()
    assert (stored_q(speculator) - q)[1:].abs().max() < 2e-6
    assert speculator.draft_logits.numel() == 0
    assert speculator.store.logits is None


def calibrate(folder):
    """Put a calibration beside the drafter in `folder`."""
    container = open_container(folder)
    digest = stored_head_digest(check_files(container, None, None, Findings()).tensors)
    write_calibration(
        folder / CALIBRATION_FILE, ConfidenceCalibration(Scaling((0.5, 1.5, 2.0, 3.0), (0.4, -0.5, 0.0, 1.0)), digest)
    )


def test_confidences_and_numbers_of_each_step(loaded):
    """Adaptive verification reads calibrated probabilities, and drafts with numbers that no other step uses."""
    adaptive = {"draft_sample_method": "probabilistic", "enable_adaptive_verification": True}
    speculator, library = loaded({}, adaptive, prepare=calibrate)
    assert library.calibration is not None
    hidden = run(speculator)
    noise_positions = step_positions(torch.tensor(STEP.anchor_positions), 4)
    tokens, _, confidence = library_chain(library, hidden, STEP, noise_positions=noise_positions)
    assert speculator.draft_tokens[:3].tolist() == tokens.tolist()
    probs = speculator.draft_token_confidence_probs[:3]
    assert torch.allclose(probs, confidence.sigmoid(), atol=1e-6)


def test_a_checkpoint_is_read_on_the_cpu_whatever_the_default_device(target, drafter, monkeypatch):
    """vLLM builds models with the GPU as torch's default; a reduced vocabulary's table is read in between."""
    without_v1_checks(monkeypatch)
    config = make_config(target, drafter("speculators", transformer_layer_config__layer_types=["full_attention"] * 2))
    with torch.device("meta"):
        assert stored_drafter(config).config.draft_vocab_size == 129


def test_an_engine_reads_the_drafters_files_once(loaded, monkeypatch):
    read = []
    reading = v2_models.read_drafter
    monkeypatch.setattr(v2_models, "read_drafter", lambda *where: read.append(where) or reading(*where))
    speculator, library = loaded({}, {"draft_sample_method": "probabilistic"}, prepare=calibrate)
    assert len(read) == 1
    assert torch.equal(speculator.model.confidence_head.scaling, library.confidence_head.scaling)
    loaded({}, {"draft_sample_method": "probabilistic"})
    assert len(read) == 2


def test_a_requests_drafts_do_not_depend_on_its_neighbours(loaded):
    speculator, _ = loaded({}, {"draft_sample_method": "probabilistic"})
    run(speculator)
    together = speculator.draft_tokens[1].tolist()
    hidden = torch.randn(PADDED * speculator.num_query_per_req, 32, generator=torch.Generator().manual_seed(1))
    rows = speculator.num_query_per_req
    alone = Step([3], [20], [5], [0.7], [-7])
    fill_buffers(speculator, alone)
    speculator._sample_sequential(1, hidden[rows : 2 * rows])
    assert speculator.draft_tokens[0].tolist() == together


def gathered(logits, shards, tie):
    """Logits as tensor-parallel ranks gather them: slices of the padded vocabulary, with garbage in the padding."""
    vocab = logits.shape[-1]
    width = -(-vocab // (64 * shards)) * 64
    padded = torch.full((*logits.shape[:-1], shards * width), 1e4)
    padded[..., :vocab] = logits
    if tie is not None:
        padded[..., list(tie)] = 50.0
    return torch.cat([padded[..., rank * width : (rank + 1) * width].clone() for rank in range(shards)], dim=-1)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("changes", [HEADS[0], HEADS[1]])
def test_every_rank_drafts_from_gathered_shards_what_one_gpu_drafts(changes, shards, loaded, monkeypatch):
    speculator, _ = loaded(changes, {"draft_sample_method": "probabilistic"})
    run(speculator)
    alone = speculator.draft_tokens.clone()
    whole = speculator.model.compute_draft_logits
    monkeypatch.setattr(speculator.model, "compute_draft_logits", lambda hidden: gathered(whole(hidden), shards, None))
    for _rank in range(shards):
        run(speculator)
        assert torch.equal(speculator.draft_tokens, alone)


@pytest.mark.parametrize("tie", [(127, 128), (63, 64), (2, 200)])
def test_of_equal_logits_in_two_shards_the_lower_id_is_drafted(tie, loaded, monkeypatch):
    changes = {"markov_rank": 0, "confidence_head_with_markov": False}  # a bias would break the tie
    speculator, _ = loaded(changes, {"draft_sample_method": "probabilistic"})
    whole = speculator.model.compute_draft_logits
    monkeypatch.setattr(speculator.model, "compute_draft_logits", lambda hidden: gathered(whole(hidden), 4, tie))
    run(speculator)
    assert (speculator.draft_tokens[0] == tie[0]).all(), "request 0 is greedy"
    assert torch.isin(speculator.draft_tokens[1:3], torch.tensor(tie)).all()
