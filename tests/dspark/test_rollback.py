"""The coordinator alone: requests that join, leave, reorder and step by any number of tokens have the state of plain
decoding.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_cases import HEADS, KEY_DIM, LAYERS, VALUE_DIM, WEIGHT, WIDTH, inputs, layer_tokens, run, specs

from dspark.kernels import kda_verify
from dspark.kernels.kda import Gate, kda_scan
from dspark.rollback import HybridCache, RecurrentState

FOLDS = pytest.mark.parametrize("defer_folds", [True, False], ids=["fold-when-full", "fold-every-step"])


def expected(seed, count):
    """State of each layer and window after the first `count` tokens of a line, by definition."""
    line, channels = inputs([seed], [0], count), specs()[0].channels
    padded = torch.cat([torch.zeros(1, WIDTH - 1, channels, dtype=torch.float64), line[..., :channels]], 1)
    mixed = torch.nn.functional.silu((padded.unfold(1, WIDTH, 1) * WEIGHT).sum(-1)) if count else padded[:, :0]
    zero = torch.zeros(1, HEADS, VALUE_DIM, KEY_DIM, dtype=torch.float64)
    tokens = layer_tokens(mixed, line[..., channels:])
    states = [kda_scan(tokens, spec.gate, zero)[2][:, -1] if count else zero for spec in specs()]
    return states, padded[:, count:]


def check(state, requests):
    """`requests`: [seed, tokens committed] by row."""
    for row, (seed, count) in enumerate(requests):
        states, window = expected(seed, count)
        copy = RecurrentState(state.specs, 0, "cpu", defer_folds=state.defer_folds)
        vars(copy).update(vars(state))
        copy.layers = [type(x)(x.checkpoint.clone(), x.records, x.gate) for x in state.layers]
        copy._table = None
        copy.cursor = type(state.cursor)(state.num_slots, state.cursor.capacity, state.cursor.window)
        copy.cursor.start, copy.cursor.held = state.cursor.start.clone(), state.cursor.held.clone()
        copy.fold()
        for layer in range(LAYERS):
            torch.testing.assert_close(
                copy.layers[layer].checkpoint[state.slots[row]], states[layer][0], rtol=1e-11, atol=1e-13
            )
            assert torch.equal(state.histories(layer)[row], window[0])


def admitted(state, requests, joining):
    """Prefill lines of the given lengths beside the running requests."""
    fresh = RecurrentState(specs(), len(joining), "cpu", defer_folds=state.defer_folds)
    run(
        fresh,
        inputs([seed for seed, _ in joining], [0] * len(joining), max(n for _, n in joining)),
        [n for _, n in joining],
    )
    fresh.commit([n for _, n in joining])
    state.append(fresh)
    return requests + [list(r) for r in joining]


@FOLDS
def test_the_kernel_that_convolves_leaves_the_same_state(defer_folds, device, monkeypatch):
    """Steps of more tokens than the serial kernel takes, rows that leave and whose slots others get: against two
    launches. States, corrections and outputs to a rounding, inputs to the bit."""
    monkeypatch.setattr("dspark.kernels.kda_verify.runs_kernel", lambda x: True)
    single = [replace(x, dtype=torch.float32, state_dtype=torch.float32) for x in specs()]
    gates = [[y.to(device, torch.float32) for y in (x.gate.a_log, x.gate.dt_bias)] for x in single]
    single = [replace(x, gate=Gate(*gate, -5.0)) for x, gate in zip(single, gates, strict=True)]
    launches, outcomes = [], []
    launch = kda_verify.launch_kda_chunk

    def watched(*args, window=None, **options):
        launches[-1].append(window is not None)
        return launch(*args, window=window, **options)

    monkeypatch.setattr(kda_verify, "launch_kda_chunk", watched)
    for fuse_below in (193, 0):
        monkeypatch.setattr(kda_verify, "FUSE_BELOW", fuse_below)
        launches.append([])
        state, requests, found = RecurrentState(single, 0, device, defer_folds=defer_folds), [[7, 0]], []
        for step, kept in enumerate([(4, 1, 5), (0, 6, 3), (2, 5, 1)]):
            state.keep(range(1, len(requests)))
            joining = [(10 * step + i, 2 + i) for i in range(4 - len(requests))]
            fresh = RecurrentState(single, len(joining), device, defer_folds=defer_folds)
            line = inputs([s for s, _ in joining], [0] * len(joining), joining[-1][1])
            run(fresh, line.to(device, torch.float32), [n for _, n in joining])
            fresh.commit([n for _, n in joining])
            state.append(fresh)
            requests = requests[1:] + [list(r) for r in joining]
            line = inputs([s for s, _ in requests], [n for _, n in requests], 6)
            found.append(run(state, line.to(device, torch.float32)))
            state.commit(kept)
            requests = [[s, n + k] for (s, n), k in zip(requests, kept, strict=True)]
        state.fold()
        found += [layer.checkpoint[state.slots] for layer in state.layers]
        outcomes.append((found, [state.histories(layer) for layer in range(LAYERS)]))
    assert launches == [[False, True] * 3, [False, False] * 3]
    for got, want in zip(*(found for found, _ in outcomes), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for got, want in zip(*(histories for _, histories in outcomes), strict=True):
        assert torch.equal(got, want)


@FOLDS
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_sequence_of_passes_is_plain_decoding(defer_folds, data):
    state, requests, seed = RecurrentState(specs(), 0, "cpu", defer_folds=defer_folds), [], 0
    for _ in range(data.draw(st.integers(2, 9))):
        kind = data.draw(st.sampled_from(["join", "step", "step", "step", "step", "leave", "abandon"]))
        if kind == "join" or not requests:
            lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
            requests = admitted(state, requests, [(seed + i, n) for i, n in enumerate(lengths)])
            seed += len(lengths)
        elif kind == "leave":
            rows = data.draw(st.permutations(range(len(requests))))[: data.draw(st.integers(0, len(requests)))]
            state.keep(rows)
            requests = [requests[row] for row in rows]
        else:
            num_tokens = data.draw(st.integers(1, 6))
            run(state, inputs([s for s, _ in requests], [n for _, n in requests], num_tokens))
            if kind == "step":
                kept = [data.draw(st.integers(0, num_tokens)) for _ in requests]
                state.commit(kept)
                requests = [[s, n + k] for (s, n), k in zip(requests, kept, strict=True)]
        check(state, requests)


def started(defer_folds=True, lengths=(3, 5)):
    state = RecurrentState(specs(), 0, "cpu", defer_folds=defer_folds)
    return state, admitted(state, [], list(enumerate(lengths)))


@FOLDS
def test_verification_changes_nothing_but_records_and_is_repeatable(defer_folds):
    state, _ = started(defer_folds)
    rows = inputs([0, 1], [3, 5], 4)
    first = run(state, rows)
    committed = [layer.checkpoint.clone() for layer in state.layers]
    assert torch.equal(run(state, rows), first)
    assert all(torch.equal(layer.checkpoint, before) for layer, before in zip(state.layers, committed, strict=True))
    state.commit([0, 0])
    assert all(torch.equal(layer.checkpoint, before) for layer, before in zip(state.layers, committed, strict=True))
    assert torch.equal(run(state, rows), first)


def test_an_abandoned_pass_that_folded_is_not_folded_again():
    state, requests = started()
    while not (state.cursor.held[state.slots] > state.cursor.max_held).all() or state.window < 6:
        run(state, inputs([s for s, _ in requests], [n for _, n in requests], 6))
        state.commit([6, 6])
        requests = [[s, n + 6] for s, n in requests]
    before = [layer.checkpoint.clone() for layer in state.layers]
    state.begin(6)  # and no layer gets to run
    for _ in range(2):
        run(state, inputs([s for s, _ in requests], [n for _, n in requests], 6))
    assert not any(torch.equal(layer.checkpoint, old) for layer, old in zip(state.layers, before, strict=True))
    state.commit([2, 0])
    check(state, [[requests[0][0], requests[0][1] + 2], requests[1]])


def test_rejecting_moves_a_cursor_and_writes_no_state():
    state, _ = started()
    run(state, inputs([0, 1], [3, 5], 4))
    pools = [x for layer in state.layers for x in (layer.checkpoint, *vars(layer.records).values())] + state.rings
    versions = [pool._version for pool in pools]
    state.commit([1, 4])
    assert [pool._version for pool in pools] == versions
    check(state, [[0, 4], [1, 9]])


def test_the_cursor_moves_once_a_step_and_folds_only_when_the_ring_is_full():
    state, requests = started()
    folds = 0
    for _ in range(40):
        before = state.layers[0].checkpoint.clone()
        run(state, inputs([s for s, _ in requests], [n for _, n in requests], 5))
        folds += not torch.equal(before, state.layers[0].checkpoint)
        state.commit([4, 4])
        requests = [[s, n + 4] for s, n in requests]
    check(state, requests)
    assert folds == 40 // (state.cursor.max_held // 4 + 1)


@FOLDS
def test_wider_steps_than_ever_before_make_room(defer_folds):
    state, requests = started(defer_folds)
    for num_tokens in (1, 2, 9, 40, 3):
        run(state, inputs([s for s, _ in requests], [n for _, n in requests], num_tokens))
        kept = [num_tokens // 2, num_tokens]
        state.commit(kept)
        requests = [[s, n + k] for (s, n), k in zip(requests, kept, strict=True)]
        check(state, requests)


def test_joining_with_records_still_held_and_into_a_used_slot():
    state, _ = started(lengths=(3, 5, 2))
    run(state, inputs([0, 1, 2], [3, 5, 2], 4))
    state.commit([4, 4, 4])
    state.keep([2])
    other, _ = started(lengths=(4, 1))
    run(other, inputs([0, 1], [4, 1], 2))
    other.commit([2, 1])
    state.append(other)
    check(state, [[2, 6], [0, 6], [1, 2]])


def test_a_row_does_not_depend_on_its_neighbours():
    state, _ = started(lengths=(3, 5, 2))
    together = run(state, inputs([0, 1, 2], [3, 5, 2], 4))
    state.keep([2, 0])
    torch.testing.assert_close(run(state, inputs([2, 0], [2, 3], 4)), together[[2, 0]], rtol=1e-13, atol=1e-15)


def test_wrong_commits_are_named_and_change_nothing():
    state, requests = started()
    with pytest.raises(ValueError, match="no pass to commit"):
        state.commit([1, 1])
    run(state, inputs([0, 1], [3, 5], 4))
    for bad in ([5, 0], [0, -1]):
        with pytest.raises(ValueError, match=r"within 0\.\.4"):
            state.commit(bad)
    check(state, requests)
    state.commit([4, 0])
    with pytest.raises(ValueError, match="committing twice"):
        state.commit([4, 0])
    fresh = RecurrentState(specs(), 1, "cpu")
    run(fresh, inputs([0], [0], 4), [4])
    with pytest.raises(ValueError, match="expected 4, the whole prompt"):
        fresh.commit([3])


def test_a_wrong_commit_leaves_attention_and_recurrent_state_together():
    cache = HybridCache(3, 2, "cpu", specs(), (0, 2))
    run(cache.recurrent, inputs([0, 1], [0, 0], 4), [4, 2])
    with pytest.raises(ValueError, match="whole prompt"):
        cache.advance([4, 4])
    assert cache.lengths.tolist() == [0, 0]
    cache.advance([4, 2])
    assert cache.lengths.tolist() == [4, 2]
    cache.keep([1])
    assert (cache.lengths.tolist(), cache.recurrent.slots) == ([2], [1])
