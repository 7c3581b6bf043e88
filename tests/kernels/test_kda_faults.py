"""Faults seen in public implementations, planted one at a time: a fixed run of steps must notice every one of them."""

import dataclasses

import kda_engine
import pytest
import torch
from kda_cases import KERNEL_ERROR
from kda_engine import Engine

import dspark.kernels.kda_commit
import dspark.kernels.kda_ring
import dspark.kernels.kda_verify
from dspark.kernels.conv_window import launch_conv_window
from dspark.kernels.kda import LayerTable, replay
from dspark.kernels.kda_chunk import launch_kda_chunk
from dspark.kernels.kda_commit import launch_kda_commit
from dspark.kernels.kda_verify import launch_kda_serial

pytestmark = pytest.mark.usefixtures("on_device")

# (rows by slot, query lengths, accepted); None: slot 0 is given to a new request
RUN = [
    ([0, 1], [5, 4], [2, 4]),
    ([1, 0], [5, 5], [0, 5]),
    ([0, 1, -1], [1, 5, 0], [1, 3, 0]),
    None,
    ([0, 1], [5, 1], [1, 1]),
    ([1, 0], [2, 3], [2, 0]),
    ([0, 1], [5, 5], [5, 5]),
    ([0, 1], [5, 5], [4, 1]),
    ([0, 1], [5, 5], [4, 1]),
]


def run(deferred, bound=1e-12, **layer):
    engine = Engine(deferred=deferred, **layer)
    engine.error = bound
    for slot in (0, 1):
        engine.admit(slot)
    for step in RUN:
        if step is None:
            engine.admit(0)
        else:
            engine.step(*step)


def patched_replay(change):
    def patch(monkeypatch):
        monkeypatch.setattr(dspark.kernels.kda_commit, "replay", lambda *args: replay(*change(*args)))

    return patch


def scalar_gate(state, u, k, g):
    return state, u, k, g.mean(-1, keepdim=True).expand_as(g)


def shifted_gate(state, u, k, g):
    return state, u, k, g.roll(1, dims=2)


def undecayed_checkpoint(state, u, k, g):
    return state * (-g.sum(2, keepdim=True)).exp(), u, k, g


def raw_value(monkeypatch):
    scan = dspark.kernels.kda_verify.kda_scan

    def scan_recording_value(tokens, gate, state):
        outputs, _, states = scan(tokens, gate, state)
        return outputs, tokens.value, states

    monkeypatch.setattr(dspark.kernels.kda_verify, "kda_scan", scan_recording_value)


def rounded_beta(monkeypatch):
    scan = dspark.kernels.kda_verify.kda_scan

    def scan_with_rounded_beta(tokens, gate, state):
        rounded = torch.logit(torch.sigmoid(tokens.beta).bfloat16().to(tokens.beta.dtype))
        return scan(dataclasses.replace(tokens, beta=rounded), gate, state)

    monkeypatch.setattr(dspark.kernels.kda_verify, "kda_scan", scan_with_rounded_beta)


def count_off_by(delta):
    def patch(monkeypatch):
        commit, advance = kda_engine.kda_commit, dspark.kernels.kda_ring.RingCursor.advance
        monkeypatch.setattr(
            kda_engine,
            "kda_commit",
            lambda layers, rows, n, **options: commit(layers, rows, (n + delta).clamp_min(0), **options),
        )
        monkeypatch.setattr(
            dspark.kernels.kda_ring.RingCursor,
            "advance",
            lambda self, rows, n: advance(self, rows, (n + delta).clamp_min(0)),
        )

    return patch


def verify_writes_state(monkeypatch):
    verify = kda_engine.kda_verify

    def leaking(tokens, layer, rows):
        outputs = verify(tokens, layer, rows)
        layer.checkpoint[0] += 1e-9
        return outputs

    monkeypatch.setattr(kda_engine, "kda_verify", leaking)


def records_skipped_for_plain_rows(monkeypatch):
    verify = kda_engine.kda_verify

    def skipping(tokens, layer, rows):
        saved = [store.clone() for store in vars(layer.records).values()]
        outputs = verify(tokens, layer, rows)
        for row, slot in enumerate(rows.slots.tolist()):
            if slot >= 0 and rows.num_rows[row] == 1:
                for store, old in zip(vars(layer.records).values(), saved, strict=True):
                    store[slot] = old[slot]
        return outputs

    monkeypatch.setattr(kda_engine, "kda_verify", skipping)


def window_not_rolled_back(monkeypatch):
    convolve = kda_engine.Engine.convolve
    monkeypatch.setattr(
        kda_engine.Engine, "convolve", lambda self, slots, num_rows, accepted: convolve(self, slots, num_rows, num_rows)
    )


def window_never_advanced(monkeypatch):
    convolve = kda_engine.Engine.convolve

    def stale(self, slots, num_rows, accepted):
        cursor = self.conv_cursor.clone()
        convolve(self, slots, num_rows, accepted)
        self.conv_cursor = cursor

    monkeypatch.setattr(kda_engine.Engine, "convolve", stale)


def cursor_survives_reuse(monkeypatch):
    monkeypatch.setattr(dspark.kernels.kda_ring.RingCursor, "reset", lambda self, slots: None)


def fold_forgotten_by_cursor(monkeypatch):
    advance = dspark.kernels.kda_ring.RingCursor.advance
    forget = lambda rows: dataclasses.replace(rows, fold=rows.fold & False)  # noqa: E731
    monkeypatch.setattr(
        dspark.kernels.kda_ring.RingCursor, "advance", lambda self, rows, n: advance(self, forget(rows), n)
    )


def records_by_batch_row(monkeypatch):
    commit = kda_engine.kda_commit

    def by_row(layers, rows, n, **options):
        return commit(layers, dataclasses.replace(rows, record_slots=torch.arange(len(rows.slots))), n, **options)

    monkeypatch.setattr(kda_engine, "kda_commit", by_row)


BOTH, COMMIT, RING = (False, True), (False,), (True,)
FAULTS = [
    ("raw-value-recorded", BOTH, raw_value),
    ("scalar-gate", BOTH, patched_replay(scalar_gate)),
    ("gate-shifted-by-one", BOTH, patched_replay(shifted_gate)),
    ("checkpoint-not-decayed", BOTH, patched_replay(undecayed_checkpoint)),
    ("beta-rounded-in-verify", BOTH, rounded_beta),
    ("one-token-too-many", BOTH, count_off_by(1)),
    ("one-token-too-few", BOTH, count_off_by(-1)),
    ("verify-writes-the-checkpoint", BOTH, verify_writes_state),
    ("plain-step-skips-its-record", BOTH, records_skipped_for_plain_rows),
    ("window-left-rolled-forward", BOTH, window_not_rolled_back),
    ("window-left-stale", BOTH, window_never_advanced),
    ("cursor-survives-slot-reuse", RING, cursor_survives_reuse),
    ("cursor-misses-a-fold", RING, fold_forgotten_by_cursor),
    ("records-found-by-batch-row", COMMIT, records_by_batch_row),
]


@pytest.mark.parametrize("deferred", BOTH, ids=["fold-every-step", "fold-when-full"])
def test_the_run_passes_unharmed(deferred):
    run(deferred)


@pytest.mark.parametrize("capacity", [None, 10, 16], ids=["commit", "fold-in-the-next-verification", "fold-when-full"])
@pytest.mark.parametrize("verify", [launch_kda_chunk, launch_kda_serial], ids=["chunk", "serial"])
def test_the_run_passes_with_the_kernels(capacity, verify, monkeypatch):
    def commit(layers, rows, n, destinations=None, boundary=None):
        launch_kda_commit(LayerTable(layers), rows, n, rows.slots if destinations is None else destinations, boundary)

    monkeypatch.setattr(kda_engine, "kda_verify", verify)
    monkeypatch.setattr(kda_engine, "kda_commit", commit)
    monkeypatch.setattr(kda_engine, "conv_window", launch_conv_window)
    run(capacity is not None, bound=KERNEL_ERROR, dtype=torch.float32, capacity=capacity)


@pytest.mark.parametrize(
    ("fault", "deferred"),
    [
        pytest.param(fault, mode, id=f"{name}-{'ring' if mode else 'commit'}")
        for name, modes, fault in FAULTS
        for mode in modes
    ],
)
def test_planted_fault_is_seen(fault, deferred, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run(deferred)
