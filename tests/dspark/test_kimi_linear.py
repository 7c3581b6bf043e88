"""A Kimi Linear target in the loop: drafting changes nothing but the number of steps, and every broken rollback shows
in the text."""

import pytest
import torch
from kimi import ATTENTION, KDA, kimi_model, kimi_pair, kimi_target
from pairs import drafter_config, tiny_drafter
from transformers import Mamba2Config, Mamba2ForCausalLM, OlmoHybridConfig, OlmoHybridForCausalLM

from dspark import SamplingParams, generate
from dspark.rollback import RecurrentState
from dspark.target import HFTarget

PROMPTS = [[1, 2, 3], [9, 4, 6, 7, 21, 8, 5], [30], [14, 3, 3, 17] * 5]
GREEDY = SamplingParams(temperature=0, max_new_tokens=45)
FOLDS = pytest.mark.parametrize("defer_folds", [True, False], ids=["fold-when-full", "fold-every-step"])


def tokens(generations):
    return [g.token_ids for g in generations]


@pytest.fixture(scope="module")
def pair():
    target, drafter = kimi_pair()
    return target, drafter, tokens(generate(target, None, PROMPTS, GREEDY))


def folding(target, defer_folds, monkeypatch):
    new_cache = target.new_cache

    def folding_cache(batch_size):
        cache = new_cache(batch_size)
        cache.recurrent.defer_folds = defer_folds
        return cache

    monkeypatch.setattr(target, "new_cache", folding_cache)


@FOLDS
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_greedy_output_is_that_of_plain_decoding_for_every_k(pair, num_draft_tokens, defer_folds, monkeypatch):
    target, drafter, plain = pair
    folding(target, defer_folds, monkeypatch)
    drafted = generate(target, drafter, PROMPTS, GREEDY, num_draft_tokens=num_draft_tokens, max_batch_size=3)
    assert tokens(drafted) == plain


@FOLDS
@pytest.mark.parametrize("num_draft_tokens", [2, 8], ids=["serial-kernel", "chunk-kernel"])
def test_greedy_output_in_float32_on_every_device(num_draft_tokens, defer_folds, device, monkeypatch):
    """On a GPU the kernels run, of short windows and of long ones."""
    target, drafter = kimi_pair(dtype=torch.float32)
    target, drafter = HFTarget(target.model.to(device)), drafter.to(device)
    folding(target, defer_folds, monkeypatch)
    drafted = generate(target, drafter, PROMPTS, GREEDY, num_draft_tokens=num_draft_tokens, max_batch_size=3)
    assert tokens(drafted) == tokens(generate(target, None, PROMPTS, GREEDY))
    assert max(s.num_accepted for g in drafted for s in g.steps) == num_draft_tokens


def test_every_accepted_length_occurs_and_requests_differ(pair):
    target, drafter, plain = pair
    params = SamplingParams(temperature=0, max_new_tokens=150)
    steps = [s for g in generate(target, drafter, PROMPTS, params) for s in g.steps if s.num_offered == 8]
    assert {s.num_accepted for s in steps} == set(range(9))
    assert len({tuple(text) for text in plain}) == len(PROMPTS)


def test_a_random_drafter_and_taps_of_recurrent_layers():
    target = kimi_target()
    drafter = tiny_drafter(drafter_config(32, tap_ids=(0, 1, 2, 4)), target)
    plain = tokens(generate(target, None, PROMPTS, GREEDY))
    assert tokens(generate(target, drafter, PROMPTS, GREEDY)) == plain
    assert tokens(generate(target, None, PROMPTS[1:2], GREEDY)) == plain[1:2]


def test_a_seeded_request_is_the_same_alone_and_in_any_batch(pair):
    target, drafter, _ = pair
    seeded = SamplingParams(temperature=0.8, seed=3, max_new_tokens=30)
    other = SamplingParams(temperature=1.0, seed=5, max_new_tokens=11)
    alone = generate(target, drafter, [PROMPTS[1]], seeded)[0].token_ids
    batched = generate(target, drafter, [PROMPTS[0], PROMPTS[1], PROMPTS[2]], [other, seeded, other], max_batch_size=2)
    assert batched[1].token_ids == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_as_near_to_float64_as_those_of_transformers(dtype):
    """At most twice its own distance. No experts here: a rounded router would choose others, whatever the state."""
    model = kimi_model(dtype=dtype, mlp_layer_types=["dense"] * 4)
    exact = kimi_model(mlp_layer_types=["dense"] * 4)
    exact.load_state_dict({name: weight.double() for name, weight in model.state_dict().items()})
    prompt = torch.randint(0, 32, (1, 41), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(prompt).logits
    truth = HFTarget(exact)
    truth = truth.verify(truth.new_cache(1), prompt).logits[:, 19:]
    target = HFTarget(model)
    cache = target.new_cache(1)
    verified = [target.prefill(cache, [prompt[0, :20].tolist()]).logits[:, None]]
    for start in range(20, 41, 7):
        verified.append(target.verify(cache, prompt[:, start : start + 7]).logits)
        target.commit(cache, [7])
    distance = (torch.cat(verified, 1).double() - truth).norm()
    assert distance <= 2 * (expected[:, 19:].double() - truth).norm()
    with torch.no_grad():  # with any other cache the model is transformers' own
        assert torch.equal(model(prompt).logits, expected)


@FOLDS
@torch.inference_mode()
def test_what_was_rejected_is_never_read_again(defer_folds, monkeypatch):
    """Attention rows past the length become large numbers, since a masked NaN would poison a sum; the rest becomes
    NaN."""
    target = kimi_target()
    folding(target, defer_folds, monkeypatch)
    prompt, first, second = [5, 9, 2, 7], torch.tensor([[3, 8, 1, 1, 1]]), torch.tensor([[4, 6, 10]])
    logits = []
    for poison in (False, True):
        cache = target.new_cache(1)
        target.prefill(cache, [prompt])
        target.verify(cache, first)
        target.commit(cache, [2])
        assert cache.lengths.tolist() == [len(prompt) + 2]
        state = cache.recurrent
        if poison:
            rows = (state.cursor.start + state.cursor.held)[0] + torch.arange(3)
            ring_rows = (state.conv_cursor[0] + torch.arange(3)) % state.rings[0].shape[1]
            for layer, ring in zip(state.layers, state.rings, strict=True):
                for store in vars(layer.records).values():
                    store[0, :, rows % store.shape[2]] = float("nan")
                ring[0, ring_rows] = float("nan")
            for store in (x for x in cache.keys + cache.values if x is not None):
                store[:, len(prompt) + 2 :] = 1e6
        logits.append(target.verify(cache, second).logits)
    assert torch.equal(*logits)


def test_the_state_may_lie_in_any_layer():
    for types in ([ATTENTION, KDA], [KDA, ATTENTION, KDA, KDA, ATTENTION]):
        target = kimi_target(layer_types=types)
        drafter = tiny_drafter(drafter_config(32, tap_ids=(1, 2)), target)
        short = SamplingParams(temperature=0, max_new_tokens=20)
        assert tokens(generate(target, drafter, PROMPTS, short)) == tokens(generate(target, None, PROMPTS, short))


# Rollback broken on purpose. `commit` is the method as it should be.


def keeps_rejected_state(monkeypatch):
    commit = RecurrentState.commit
    monkeypatch.setattr(RecurrentState, "commit", lambda self, num_rows: commit(self, self._rows.num_rows.tolist()))


def keeps_one_token_too_few(monkeypatch):
    commit = RecurrentState.commit

    def one_fewer(self, num_rows):
        commit(self, num_rows if self._fresh else [max(n - 1, 0) for n in num_rows])

    monkeypatch.setattr(RecurrentState, "commit", one_fewer)


def window_only(wrong_counts):
    def patch(monkeypatch):
        commit = RecurrentState.commit

        def commit_with_other_window(self, n):
            rows, fresh, before = self._rows, self._fresh, self.conv_cursor.clone()
            commit(self, n)
            if not fresh:
                self.conv_cursor[rows.slots] = (before[rows.slots] + wrong_counts(rows)) % self.rings[0].shape[1]

        monkeypatch.setattr(RecurrentState, "commit", commit_with_other_window)

    return patch


def state_not_advanced(monkeypatch):
    commit = RecurrentState.commit

    def stale(self, n):
        rows, fresh = self._rows, self._fresh
        commit(self, n)
        if not fresh:
            self.cursor.held[rows.slots] = torch.where(rows.fold, 0, rows.held)

    monkeypatch.setattr(RecurrentState, "commit", stale)


def uniform_steps_are_not_committed(monkeypatch):
    commit = RecurrentState.commit

    def forgetful(self, num_rows):
        commit(self, num_rows if self._fresh or len(set(num_rows)) > 1 else [0] * len(num_rows))

    monkeypatch.setattr(RecurrentState, "commit", forgetful)


def reused_slot_keeps_its_cursor(monkeypatch):
    append = RecurrentState.append

    def append_without_reset(self, other):
        cursor = self.cursor
        monkeypatch.setattr(cursor, "reset", lambda slots: None)
        append(self, other)

    monkeypatch.setattr(RecurrentState, "append", append_without_reset)


def slots_follow_batch_rows(monkeypatch):
    keep = RecurrentState.keep

    def renumber(self, requests):
        keep(self, requests)
        self.slots = list(range(len(self.slots)))

    monkeypatch.setattr(RecurrentState, "keep", renumber)


FAULTS = [
    pytest.param(keeps_rejected_state, id="rejected-drafts-stay-in-the-state"),
    pytest.param(keeps_one_token_too_few, id="one-token-too-few"),
    pytest.param(window_only(lambda rows: rows.num_rows), id="window-left-rolled-forward"),
    pytest.param(window_only(lambda rows: 0 * rows.num_rows), id="window-left-stale"),
    pytest.param(state_not_advanced, id="state-never-advanced"),
    pytest.param(uniform_steps_are_not_committed, id="uniform-steps-not-committed"),
    pytest.param(reused_slot_keeps_its_cursor, id="reused-slot-keeps-its-cursor"),
    pytest.param(slots_follow_batch_rows, id="slots-follow-batch-rows"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_rollback_changes_the_text(pair, fault, monkeypatch):
    target, drafter, plain = pair
    fault(monkeypatch)
    params = [SamplingParams(temperature=0, max_new_tokens=n) for n in (20, 45, 45, 45)]
    drafted = generate(target, drafter, PROMPTS, params, max_batch_size=2)
    assert tokens(drafted) != [text[: p.max_new_tokens] for text, p in zip(plain, params, strict=True)]


def test_the_run_of_the_broken_rollbacks_is_right_unharmed(pair):
    target, drafter, plain = pair
    params = [SamplingParams(temperature=0, max_new_tokens=n) for n in (20, 45, 45, 45)]
    drafted = generate(target, drafter, PROMPTS, params, max_batch_size=2)
    assert tokens(drafted) == [text[: p.max_new_tokens] for text, p in zip(plain, params, strict=True)]


def test_other_recurrent_layers_are_refused_by_name():
    fields = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "pad_token_id": None,
    }
    fields |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "layer_types": ["full_attention", "linear_attention"],
    }
    negative = OlmoHybridForCausalLM(OlmoHybridConfig(**fields))  # its beta reaches 2
    with pytest.raises(
        ValueError, match=r"layer 1 of the target is recurrent \(linear_attention: .*OlmoHybridGatedDelta"
    ):
        HFTarget(negative)
    mamba = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=16, hidden_size=16, num_heads=4, head_dim=8, state_size=8, n_groups=1, num_hidden_layers=1
        )
    )
    with pytest.raises(ValueError, match=r"[Mm]amba"):
        HFTarget(mamba)
