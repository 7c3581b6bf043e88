"""The short convolution with a history that a cursor rolls back."""

import pytest
import torch
import torch.nn.functional as F
from kda_cases import close, draw, line_up

from dspark.kernels.conv_window import conv_window, conv_window_ref, launch_conv_window

pytestmark = pytest.mark.usefixtures("on_device")
IMPLEMENTATIONS = pytest.mark.parametrize(
    "convolve", [conv_window_ref, launch_conv_window], ids=["reference", "kernel"]
)


def ints(*values):
    return torch.tensor(values)


@IMPLEMENTATIONS
def test_known_window(convolve):
    """Width 4 holds three inputs. Committed 1, 2, 3; verified 4..8, of which two are kept: the window is 3, 4, 5."""
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    ring = torch.full((1, 8, 1), float("nan"))
    ring[0, :3, 0] = torch.tensor([1.0, 2.0, 3.0])
    out = convolve(torch.tensor([[[4.0], [5.0], [6.0], [7.0], [8.0]]]), weight, ring, ints(0), ints(3), ints(5))
    close(out[0, :, 0], torch.tensor([4321.0, 5432.0, 6543.0, 7654.0, 8765.0]), 1e-6)
    cursor = 3 + 2
    assert ring[0, [cursor - 3, cursor - 2, cursor - 1], 0].tolist() == [3.0, 4.0, 5.0]
    out = convolve(torch.tensor([[[9.0]]]), weight, ring, ints(0), ints(cursor), ints(1))
    assert out.item() == pytest.approx(9543.0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 9, 17])
def test_a_line_in_pieces_is_one_convolution(convolve, width, num_tokens):
    """Every piece but the last is rolled back to a random length first; channels are no multiple of a tile."""
    channels, length = 130, 21
    line, weight = draw(length, channels), draw(channels, width, seed=1)
    expected = F.silu(F.conv1d(F.pad(line.T[None], (width - 1, 0)), weight[:, None], groups=channels))[0].T
    ring = torch.full((2, width - 1 + num_tokens, channels), float("nan"))
    ring[1, : width - 1] = 0
    done, cursor, generator = 0, width - 1, torch.Generator().manual_seed(2)
    while done < length:
        count = min(num_tokens, length - done)
        pieces = torch.full((2, num_tokens, channels), float("nan"))
        pieces[0, :count] = line[done : done + count]
        out = convolve(pieces, weight, ring, ints(1, -1), ints(cursor % ring.shape[1], 0), ints(count, num_tokens))
        close(out[0, :count], expected[done : done + count], 1e-6)
        assert not out[0, count:].any()
        assert not out[1].any()
        kept = (
            int(torch.randint(0, count + 1, (), generator=generator, device="cpu")) if done + count < length else count
        )
        ring[1, [(cursor + i) % ring.shape[1] for i in range(kept, count)]] = float("nan")  # rejected: never read again
        done, cursor = done + kept, cursor + kept
    assert ring[0].isnan().all()


def test_a_row_is_bitwise_independent_of_the_batch():
    inputs, weight, ring = draw(3, 5, 20), draw(20, 4, seed=1), draw(4, 8, 20, seed=2)
    whole = launch_conv_window(inputs, weight, ring.clone(), ints(3, 0, 2), ints(4, 1, 7), ints(5, 2, 5))
    alone = launch_conv_window(inputs[2:], weight, ring.clone(), ints(2), ints(7), ints(5))
    assert torch.equal(alone[0], whole[2])


@IMPLEMENTATIONS
def test_packed_inputs_are_the_same_rows(convolve):
    """Runs in another order than rows, NaN between them; the run of a padding row is zero."""
    inputs, weight, ring, num_rows = draw(4, 5, 20), draw(20, 4, seed=1), draw(4, 8, 20, seed=2), [5, 2, 3, 0]
    where = ints(3, 0, -1, 2), ints(4, 1, 0, 7), ints(*num_rows)
    apart, packed = ring.clone(), ring.clone()
    expected = convolve(inputs, weight, apart, *where)
    line, starts = line_up(inputs, num_rows, [1, 2, 0])
    out = convolve(line, weight, packed, *where, starts)
    for row in (0, 1):
        assert torch.equal(out[0, starts[row] : starts[row] + num_rows[row]], expected[row, : num_rows[row]])
        out[0, starts[row] : starts[row] + num_rows[row]] = 0
    assert not out.any()
    assert torch.equal(packed, apart)


@IMPLEMENTATIONS
def test_bfloat16_inputs_are_recorded_exactly(convolve):
    inputs, ring = draw(1, 3, 20).bfloat16(), torch.zeros(1, 6, 20, dtype=torch.bfloat16)
    out = convolve(inputs, draw(20, 4, seed=1), ring, ints(0), ints(3), ints(3))
    exact = conv_window_ref(
        inputs.double(), draw(20, 4, seed=1), torch.zeros(1, 6, 20).double(), ints(0), ints(3), ints(3)
    )
    close(out, exact, 8e-3)  # one unit of bfloat16: the interpreter cuts where a device rounds
    assert torch.equal(ring[0, 3:], inputs[0])


def test_a_ring_that_would_overwrite_its_history_is_refused():
    with pytest.raises(ValueError, match="a ring of 7 rows is too short: 5 tokens behind a history of 3 need 8"):
        conv_window(draw(1, 5, 4), draw(4, 4), draw(1, 7, 4), ints(0), ints(3), ints(5))
