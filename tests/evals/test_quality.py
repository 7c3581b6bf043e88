"""Draft quality: against generation on the same texts, under other groupings, K and ablations, and on pairs whose
figures are known by construction."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loop_enumeration import Enumeration
from pairs import counting_pair, drafter_config, tiny_drafter, tiny_target
from quality_cases import PROMPT, VOCAB, paths_of, score, score_all_texts
from test_gated_delta_net import tiny_model as recurrent_model
from tiny_target import tiny_model, tiny_tokenizer

from dspark.evals import EvalSettings, evaluate, text_groups
from dspark.evals import block_scores as scores_module
from dspark.evals.acceptance import judged_counts, judged_positions
from dspark.evals.block_scores import ScoringRule, without_markov
from dspark.evals.quality import QualityOptions, score_drafters, write_results
from dspark.evals.quality_figures import loop_law, measure_quality, prefix_outcomes, request_sums
from dspark.evals.quality_report import format_quality
from dspark.evals.stats import Bootstrap
from dspark.evals.target_states import TargetPath
from dspark.loop import generate
from dspark.sampling import SamplingParams
from dspark.target import HFTarget

Z_LIMIT = 5.0  # two-sided false-alarm rate 6e-7 per figure, if it ever were run with other seeds


def realised_sums(generations, num_draft_tokens):
    """[R, 1 + 3 K]: steps, then offered, reached and accepted by position."""
    table = judged_positions([g.steps for g in generations])
    sums = np.zeros((len(generations), 1 + 3 * num_draft_tokens))
    sums[:, 0] = [len(g.steps) for g in generations]
    for kind, values in enumerate((np.ones(len(table.position)), table.reached, table.accepted)):
        np.add.at(sums, (table.request, 1 + kind * num_draft_tokens + table.position), values)
    return sums


@pytest.mark.parametrize("stop", [None, 5], ids=["length", "stop"])
@pytest.mark.parametrize(
    ("sampling", "drafting"),
    [({}, "probabilistic"), ({"top_p": 0.8}, "probabilistic"), ({}, "greedy")],
    ids=["plain", "top-p", "greedy-drafts"],
)
def test_generation_realises_the_figures_on_its_own_texts(tmp_path, sampling, drafting, stop):
    """Given the texts, the differences of the sums have mean 0 and are independent between requests; greedy drafts
    leave none, because then the text says which were accepted."""
    target = tiny_target(16, spread=1.0)
    target.model.generation_config.eos_token_id = stop
    drafter = tiny_drafter(drafter_config(16), target)
    params = [SamplingParams(max_new_tokens=20, seed=seed, **sampling) for seed in range(150)]
    prompts = [[seed % 7, seed % 5, seed % 3] for seed in range(150)]
    generations = generate(target, drafter, prompts, params, drafting=drafting, max_batch_size=150)
    rule = ScoringRule(params[0], 4, drafting)
    scores = score(target, drafter, paths_of(generations, 20), tmp_path, rule)
    sums = request_sums(scores, loop_law(scores, 150, 4), 150)
    expected = np.hstack([sums.steps[:, None], sums.offered, sums.reached, sums.accepted])
    difference = realised_sums(generations, 4) - expected
    spread = np.sqrt((difference**2).sum(0))
    assert (spread[0] < 1e-9) == (drafting == "greedy")
    z = difference.sum(0) / np.where(spread > 0, spread, 1)
    assert np.abs(z).max() < Z_LIMIT, z
    assert np.abs(difference[:, spread < 1e-9]).max(initial=0) < 1e-6


def test_greedy_generation_is_met_exactly(tmp_path):
    target = tiny_target(16)
    drafter = tiny_drafter(drafter_config(16), target)
    params = SamplingParams(temperature=0.0, max_new_tokens=24)
    generations = generate(target, drafter, [[i, i + 1, 2] for i in range(14)], params)
    scores = score(target, drafter, paths_of(generations, 24), tmp_path, ScoringRule(params, 4))
    sums = request_sums(scores, loop_law(scores, 14, 4), 14)
    expected = np.hstack([sums.steps[:, None], sums.offered, sums.reached, sums.accepted])
    np.testing.assert_allclose(realised_sums(generations, 4), expected, atol=1e-12)


def test_figures_are_those_that_an_evaluation_comes_to(tmp_path):
    """Independent texts of the same prompts; the standard errors are read off the intervals."""
    target = HFTarget(tiny_model().double(), tiny_tokenizer())
    target.model.generation_config.eos_token_id = None
    changes = {"hidden_size": 32, "mask_token_id": 258, "tap_ids": (1, 2), "max_position_embeddings": 512}
    drafter = tiny_drafter(drafter_config(target.vocab_size, **changes), target)
    with torch.no_grad():
        drafter.lm_head.weight.mul_(0.05)  # else its drafts would never be the target's
        drafter.markov_head.markov_w2.weight.mul_(0.1)
    prompts = tmp_path / "small.jsonl"
    prompts.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(40)))
    settings = EvalSettings((str(prompts),), temperatures=(1.0,), max_new_tokens=24, batch_size=40)
    (row,) = evaluate(target, drafter, settings, progress=False)
    (scored,) = score_drafters(target, {"tiny": drafter}, settings, progress=False)
    realised, expected = row.acceptance, scored.quality
    assert realised.tokens_per_step.value > 1.3
    pairs = [(realised.tokens_per_step, expected.tokens_per_step)]
    pairs += [(realised.tokens_per_step_macro, expected.tokens_per_step_macro)]
    pairs += [(realised.acceptance_rate, expected.acceptance_rate)]
    for got, want in zip(realised.positions[:2], expected.positions[:2], strict=True):
        pairs += [(got.unconditional, want.unconditional), (got.conditional, want.conditional)]
        pairs += [(got.expected, want.one_minus_tv), (got.confidence, want.confidence)]
    pairs += [(realised.calibration.brier, expected.calibration.brier)]
    for first, second in pairs:
        error = np.hypot(first.high - first.low, second.high - second.low) / 3.92
        assert abs(first.value - second.value) < Z_LIMIT * error, (first, second)


@pytest.mark.parametrize(("num_draft_tokens", "stop"), [(3, 0), (3, 1), (3, 2), (2, 1)])
def test_confidences_are_met_as_generation_meets_them(tmp_path, monkeypatch, num_draft_tokens, stop):
    """Moments of cumulative confidence by position and outcome against the enumerated loop: exact where the prefix is
    accepted; where it is rejected the block of every anchor is drawn 60 times. Three drafts are scored, and texts end
    at a stop too, so that blocks reach beyond it."""
    target = tiny_target(3, spread=0.4)
    target.model.generation_config.eos_token_id = stop
    drafter = tiny_drafter(drafter_config(3), target)
    drafter.confidence_head.proj.weight.mul_(3)  # so that it matters which drafts they go with
    drafter.lm_head.weight.mul_(0.4)  # and none is so rare that the draws might miss it
    drafter.markov_head.markov_w2.weight.mul_(0.4)
    enumeration = Enumeration(target, drafter, (1, 0, 0), SamplingParams(max_new_tokens=5), num_draft_tokens)
    expected = enumeration.sums()
    drawn = {(i, power): [] for i in range(num_draft_tokens) for power in (0, 1, 2)}
    draw = text_groups._uniform
    for copy in range(60):
        monkeypatch.setattr(
            text_groups, "_uniform", lambda path, k, at=copy: draw(replace(path, index=path.index + 1000 * at), k)
        )
        scores, weights = score_all_texts(target, drafter, enumeration, tmp_path, {}, num_draft_tokens=3)
        law = loop_law(scores, len(weights), num_draft_tokens)
        assert weights @ request_sums(scores, law, len(weights)).offered == pytest.approx(expected.offered, abs=1e-10)
        outcomes = prefix_outcomes(scores, law)
        chance = weights[outcomes.request] * outcomes.weight
        for (i, power), values in drawn.items():
            found = chance * outcomes.survival**power * (outcomes.position == i)
            assert found[outcomes.accepted].sum() == pytest.approx(expected.confidence_moment(i, True, power), abs=1e-9)
            values.append(found[~outcomes.accepted].sum())
    for (i, power), values in drawn.items():
        error = np.std(values, ddof=1) / 60**0.5
        want = expected.confidence_moment(i, False, power)
        assert abs(np.mean(values) - want) < Z_LIMIT * error + 1e-9, (i, power, np.mean(values), want, error)


@pytest.mark.parametrize("ids", [None, [0, 2, 3]], ids=["full", "reduced"])
def test_the_rejected_draft_has_the_law_of_rejected_drafts(ids):
    """A grid of uniform numbers instead of draws: shares are right to two cells of it for each token."""
    cells = 5000
    p, q = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64), torch.tensor([0.4, 0.1, 0.3, 0.2])
    q = (q if ids is None else q[ids] / q[ids].sum()).double()
    anchors = torch.stack([torch.zeros(cells, dtype=torch.int64), torch.zeros(cells, dtype=torch.int64)], dim=1)
    texts = SimpleNamespace(
        tokens=torch.tensor([[1, 1, 1]]),
        paths=[TargetPath(0, (1,), (1, 1, 1), 3)],
        probs=p.expand(1, 2, 4),
        uniform=((torch.arange(cells, dtype=torch.float64) + 0.5) / cells)[None, :, None].expand(1, cells, 4),
        ids=None if ids is None else torch.tensor(ids),
        vocab_size=4,
    )
    judge = scores_module._Judge(texts, anchors, ScoringRule(SamplingParams(), 3))
    judge.offsets = torch.arange(cells)  # each its own number; the path is the same everywhere
    texts.tokens, texts.probs = torch.ones(1, cells + 3, dtype=torch.int64), p.expand(1, cells + 3, 4)
    judge.rejected_at = torch.zeros(cells, dtype=torch.int64)
    rejected = judge.pick_rejected(0, q.log().expand(cells, -1))
    dense = q if ids is None else torch.zeros(4, dtype=torch.float64).index_copy_(0, torch.tensor(ids), q)
    law = (dense - p).clamp_min(0)
    shares = torch.bincount(rejected, minlength=4) / cells
    torch.testing.assert_close(shares.double(), law / law.sum(), rtol=0, atol=2 / cells)
    free = judge.pick_rejected(1, q.log().expand(cells, -1))
    shares = torch.bincount(free, minlength=4) / cells
    torch.testing.assert_close(shares.double(), dense, rtol=0, atol=2 / cells)


def test_scores_do_not_depend_on_the_grouping_and_are_repeatable(tmp_path, monkeypatch):
    target = tiny_target(16)
    drafter = tiny_drafter(drafter_config(16), target)
    params = SamplingParams(max_new_tokens=20, seed=1)
    generations = generate(target, None, [[i] * (1 + i % 4) for i in range(9)], params)
    paths, rule = paths_of(generations, 20), ScoringRule(params, 4)
    first = score(target, drafter, paths, tmp_path, rule)
    again = score(target, drafter, paths, tmp_path, rule)
    monkeypatch.setattr(scores_module, "MAX_CHUNK", 5)
    monkeypatch.setattr(text_groups, "CPU_BYTES", 4 * 3 * 16 * 45)
    other = score(target, drafter, paths, tmp_path, rule)
    assert len(first.request) == 9 * 19
    for name, value in vars(first).items():
        assert np.array_equal(value, getattr(again, name)), name
        np.testing.assert_allclose(getattr(other, name), value, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
def test_targets_with_recurrent_layers_are_scored_too(tmp_path, family):
    """At temperature 0 their generation is met exactly, so states and taps are those that drafting saw."""
    target = HFTarget(recurrent_model(family))
    drafter = tiny_drafter(drafter_config(32), target)
    params = SamplingParams(temperature=0.0, max_new_tokens=16)
    generations = generate(target, drafter, [[1, 2, 3], [9, 4, 6, 7, 21, 8, 5], [30]], params)
    scores = score(target, drafter, paths_of(generations, 16), tmp_path, ScoringRule(params, 4))
    sums = request_sums(scores, loop_law(scores, 3, 4), 3)
    expected = np.hstack([sums.steps[:, None], sums.offered, sums.reached, sums.accepted])
    np.testing.assert_allclose(realised_sums(generations, 4), expected, atol=1e-12)
    seen = judged_positions([generation.steps for generation in generations])
    found = np.sort(scores.confidence[:, 0])
    first = seen.confidence[(seen.position == 0)]
    assert np.abs(found[:, None] - first).min(axis=0).max() < 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 10}], ids=["full", "reduced"])
@pytest.mark.parametrize(
    ("sampling", "drafting"),
    [({"temperature": 0.0}, "probabilistic"), ({"top_p": 0.8}, "probabilistic"), ({}, "greedy")],
)
def test_a_gpu_gives_the_scores_of_the_cpu(tmp_path, changes, sampling, drafting):
    params = SamplingParams(max_new_tokens=20, seed=1, **sampling)
    found = []
    for device in ("cpu", "cuda"):
        target = tiny_target(16)
        drafter = tiny_drafter(drafter_config(16, **changes), target).to(device)
        target.model.to(device)
        drafter.share(target.input_embedding, target.output_head, target.vocab_size)
        paths = paths_of(generate(target, None, [[i] * (1 + i % 4) for i in range(9)], params), 20)
        found.append(score(target, drafter, paths, tmp_path / device, ScoringRule(params, 4, drafting)))
    for name, value in vars(found[0]).items():
        np.testing.assert_allclose(getattr(found[1], name), value, atol=1e-9, err_msg=name)


def test_every_k_follows_from_the_largest(tmp_path):
    target = tiny_target(16, spread=1.0)
    drafter = tiny_drafter(drafter_config(16), target)
    params = SamplingParams(max_new_tokens=20, seed=1)
    generations = generate(target, None, [[i, 3] for i in range(12)], params)
    paths, bootstrap = paths_of(generations, 20), Bootstrap(12)
    widest = score(target, drafter, paths, tmp_path, ScoringRule(params, 4))
    rows = [measure_quality(widest, 12, k, bootstrap) for k in (1, 2, 4)]
    for k, row in zip((1, 2, 4), rows, strict=True):
        alone = measure_quality(score(target, drafter, paths, tmp_path, ScoringRule(params, k)), 12, k, bootstrap)
        assert row.tokens_per_step.value == pytest.approx(alone.tokens_per_step.value, abs=1e-12)
        assert len(row.positions) == len(alone.positions) == k
    assert rows[0].tokens_per_step.value < rows[1].tokens_per_step.value < rows[2].tokens_per_step.value
    assert rows[0].acceptance_rate.value > rows[2].acceptance_rate.value


def test_without_the_markov_head_is_with_a_head_of_zeros(tmp_path):
    target = tiny_target(16)
    drafter = tiny_drafter(drafter_config(16), target)
    params = SamplingParams(max_new_tokens=12, seed=1)
    paths = paths_of(generate(target, None, [[i, 3] for i in range(4)], params), 12)
    intact = score(target, drafter, paths, tmp_path, ScoringRule(params, 4))
    bare = score(target, without_markov(drafter), paths, tmp_path, ScoringRule(params, 4))
    assert drafter.markov_head is not None
    assert drafter.confidence_head is not None
    drafter.markov_head.markov_w2.weight.zero_()
    zeroed = score(target, drafter, paths, tmp_path, ScoringRule(params, 4))
    np.testing.assert_allclose(bare.accept, zeroed.accept, atol=1e-12)
    assert np.abs(bare.accept - intact.accept).max() > 0.01
    assert np.isnan(bare.confidence).all()
    assert measure_quality(bare, 4, 4, Bootstrap(4)).calibration is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_knows_the_target_is_always_accepted(tmp_path, temperature):
    target, drafter = counting_pair()
    params = SamplingParams(temperature=temperature, max_new_tokens=21, seed=1)
    paths = paths_of(generate(target, None, [[3], [9, 10]], params), 21)
    scores = score(target, drafter, paths, tmp_path, ScoringRule(params, 4))
    quality = measure_quality(scores, 2, 4, Bootstrap(2))
    assert quality.tokens_per_step.value == pytest.approx(5.0, abs=1e-3)
    assert quality.accepted_histogram[4] == pytest.approx(8, abs=1e-2)
    assert [figures.num_offered for figures in quality.positions] == pytest.approx([8] * 4, abs=1e-2)
    assert quality.positions[3].top1.value == 1.0
    assert quality.positions[3].cross_entropy.value < 1e-3


def test_a_known_mistake_costs_what_it_must(tmp_path):
    """After every eighth token the drafter is wrong: blocks of 4 drafts behind 0 go 4, then 2 and a recovery."""
    target, drafter = counting_pair(wrong_after=(7, 15, 23, 31))
    params = SamplingParams(temperature=0.0, max_new_tokens=25, seed=1)
    paths = paths_of(generate(target, None, [[31]], params), 25)  # 0 1 2 ... 24, the first by prefill
    quality = measure_quality(score(target, drafter, paths, tmp_path, ScoringRule(params, 4)), 1, 4, Bootstrap(1))
    assert quality.num_steps == 6
    assert quality.tokens_per_step.value == 4.0
    assert quality.accepted_histogram == (0.0, 0.0, 3.0, 0.0, 3.0)
    assert quality.tokens_per_step.low is None


def test_a_vocabulary_that_lacks_tokens_leaves_them_out_of_the_entropy(tmp_path):
    target = tiny_target(16)
    drafter = tiny_drafter(drafter_config(16, draft_vocab_size=10), target)
    params = SamplingParams(max_new_tokens=16, seed=4)
    paths = paths_of(generate(target, None, [[i, 3] for i in range(6)], params), 16)
    scores = score(target, drafter, paths, tmp_path, ScoringRule(params, 4))
    known = set(drafter.draft_ids().tolist())
    expected = np.mean([token in known for path in paths for token in path.token_ids[1:]])
    quality = measure_quality(scores, 6, 4, Bootstrap(6))
    assert 0 < quality.in_vocabulary.value < 1
    assert quality.in_vocabulary.value == pytest.approx(expected)
    assert np.isfinite(quality.positions[0].cross_entropy.value)
    assert (scores.accept[scores.in_vocabulary == 0] == 0).all()


def test_near_the_drafters_last_position_nothing_is_offered(tmp_path):
    target = tiny_target(16)
    drafter = tiny_drafter(drafter_config(16, max_position_embeddings=14), target)
    params = SamplingParams(max_new_tokens=16, seed=4)
    generations = generate(target, drafter, [[1, 3]], params)
    scores = score(target, drafter, paths_of(generations, 16), tmp_path, ScoringRule(params, 4))
    law = loop_law(scores, 1, 4)
    assert [judged_counts(step)[0] == 0 for step in generations[0].steps][-1]
    assert law.offered.tolist() == [4] * 9 + [0] * 6
    assert law.visits[13:].tolist() == pytest.approx([1.0, 1.0])  # the last block reaches offset 13


def test_no_text_at_all_gives_undefined_figures(tmp_path):
    target = tiny_target(16)
    drafter = tiny_drafter(drafter_config(16), target)
    paths = [TargetPath(0, (1,), (2,), 9), TargetPath(1, (1,), (3,), 9)]
    scores = score(target, drafter, paths, tmp_path, ScoringRule(SamplingParams(), 4))
    quality = measure_quality(scores, 2, 4, Bootstrap(2))
    assert (quality.num_requests, quality.num_anchors, quality.num_steps) == (2, 0, 0.0)
    assert quality.tokens_per_step.value is None
    assert quality.calibration is None


@pytest.fixture
def pair():
    target = HFTarget(tiny_model().double(), tiny_tokenizer())
    changes = {"hidden_size": 32, "mask_token_id": 258, "max_position_embeddings": 512}
    drafters = {
        "vanilla": tiny_drafter(drafter_config(target.vocab_size, tap_ids=(1, 2), **changes), target),
        "rnn": tiny_drafter(drafter_config(target.vocab_size, tap_ids=(0, 1), markov_kind="rnn", **changes), target),
    }
    return target, drafters


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(4)))
    return path


def test_rows_of_drafters_variants_and_k(pair, prompts, tmp_path):
    target, drafters = pair
    settings = EvalSettings((str(prompts),), temperatures=(0.0, 1.0), max_new_tokens=8)
    options = QualityOptions(num_draft_tokens=(2, 4), ablate=("markov",), states=tmp_path / "states")
    rows = score_drafters(target, drafters, settings, options, progress=False)
    assert [(r.drafter, r.variant, r.temperature, r.num_draft_tokens) for r in rows] == [
        (drafter, variant, temperature, k)
        for temperature in (0.0, 1.0)
        for drafter in ("vanilla", "rnn")
        for variant in ("", "without Markov head")
        for k in (2, 4)
    ]
    again = score_drafters(target, drafters, settings, options, progress=False)
    assert again == rows
    alone = score_drafters(target, {"rnn": drafters["rnn"]}, settings, options, progress=False)
    assert alone == [row for row in rows if row.drafter == "rnn"]
    assert sorted(path.name[:8] for path in (tmp_path / "states").iterdir()) == ["small-T0", "small-T1"]
    text = format_quality(rows)
    assert ["rnn", "without", "Markov", "head", "small", "1", "4", "4"] in [
        line.split()[:8] for line in text.split("\n")
    ]
    assert text.count("accepted where reached") == 8
    write_results(tmp_path / "out", rows)
    assert (tmp_path / "out" / "results.json").is_file()
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "records.jsonl").touch()
    with pytest.raises(ValueError, match="holds a run of dspark eval"):
        write_results(tmp_path / "eval", rows)


def test_states_of_changed_settings_stand_beside_the_others(pair, prompts, tmp_path):
    target, drafters = pair
    settings = EvalSettings((str(prompts),), temperatures=(1.0,), max_new_tokens=8)
    options = QualityOptions(states=tmp_path)
    for chosen in (settings, replace(settings, seed=1), settings):
        score_drafters(target, drafters, chosen, options, progress=False)
    assert len(list(tmp_path.glob("small-T1-*"))) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": (2, 2)}, r"num_draft_tokens \(2, 2\) names one twice"),
        ({"ablate": ("taps",)}, "ablate 'taps' is unknown; there is: markov"),
    ],
)
def test_options_that_name_no_row_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QualityOptions(**options)


def test_a_k_that_was_not_trained_is_refused(pair, prompts):
    target, drafters = pair
    with pytest.raises(ValueError, match=r"num_draft_tokens=5 is outside 1\.\.4"):
        score_drafters(target, drafters, EvalSettings((str(prompts),)), QualityOptions((5,)), progress=False)


def test_the_enumeration_sees_a_wrong_acceptance(tmp_path):
    """The chance before it is known what came out, the plausible mistake, is far from the law."""
    target = tiny_target(VOCAB, spread=0.7)
    drafter = tiny_drafter(drafter_config(VOCAB), target)
    enumeration = Enumeration(target, drafter, PROMPT, SamplingParams(max_new_tokens=4), 2)
    scores, weights = score_all_texts(target, drafter, enumeration, tmp_path, {})
    scores = replace(scores, accept=scores.overlap)
    sums = request_sums(scores, loop_law(scores, len(weights), 2), len(weights))
    assert abs(weights @ sums.accepted - np.array(enumeration.sums().accepted)).max() > 1e-3
