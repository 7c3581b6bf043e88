"""Philox: the published vectors, and every form of it equal to the reference bit for bit."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.kernels import philox
from dspark.kernels.philox import philox_at, philox_ref, philox_rows

# counter, key, output: known answers that Random123 publishes for philox4x32 with 10 rounds
KNOWN = [
    pytest.param(
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        id="zeros",
    ),
    pytest.param(
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
        id="ones-every-carry",
    ),
    pytest.param(
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
        id="digits-of-pi",
    ),
]
# rows, words, why the case is here
ROW_SHAPES = [
    pytest.param(0, 8, id="no-rows"),
    pytest.param(2, 0, id="no-words"),
    pytest.param(3, 1, id="one-word-of-four"),
    pytest.param(1, 4, id="exactly-one-counter"),
    pytest.param(2, 7, id="part-of-a-counter"),
    pytest.param(3, 4 * philox.TRITON_BLOCK, id="exactly-one-program"),
    pytest.param(2, 4 * philox.TRITON_BLOCK + 1, id="one-past-a-program"),
    pytest.param(2, 4 * philox.NUMPY_CHUNK + 5, id="one-past-a-chunk"),
    pytest.param(philox.NUMPY_CHUNK + 3, 3, id="more-rows-than-a-chunk"),
]
ROWS = {
    "dispatched": philox_rows,
    "numpy": philox._rows_numpy,
    "torch": philox._rows_torch,
    "triton": philox._rows_triton,
}
AT = {
    "dispatched": philox_at,
    "numpy": philox._at_numpy,
    "torch": philox._at_torch,
    "triton": philox._at_triton,
}
words = st.integers(0, 2**32 - 1)


def place(name: str, device: str) -> str:
    return "cpu" if name == "numpy" else device


def hex_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def random_rows(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 2**32, (num_rows, width), generator=generator) for width in (2, 3))


def words_by_definition(key: torch.Tensor, counter: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out = torch.stack(philox_ref((index // 4, *counter.T[..., None]), tuple(key.T[..., None])), -1)
    return out.gather(-1, (index % 4)[..., None])[..., 0]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_reference_gives_the_published_vectors(counter, key, expected):
    counter, key = ([torch.tensor(word) for word in hex_words(text)] for text in (counter, key))
    assert [int(word) for word in philox_ref(counter, key)] == hex_words(expected)


@pytest.mark.parametrize("name", AT)
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_every_form_gives_the_published_vectors(name, counter, key, expected, device):
    first, *rest = hex_words(counter)
    index = torch.tensor([[4 * first + i for i in range(4)]])
    inputs = (torch.tensor([hex_words(key)]), torch.tensor([rest]), index)
    assert AT[name](*(each.to(place(name, device)) for each in inputs)).tolist() == [hex_words(expected)]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("num_rows", "num_words"), ROW_SHAPES)
def test_rows_are_the_reference_bit_for_bit(name, num_rows, num_words, device):
    if name == "triton" and device == "cpu" and num_rows > 1000:
        pytest.skip("the interpreter takes a minute for 16387 programs; the grid is covered by the small cases")
    key, counter = random_rows(num_rows)
    out = ROWS[name](key.to(place(name, device)), counter.to(place(name, device)), num_words)
    expected = words_by_definition(key, counter, torch.arange(num_words).expand(num_rows, num_words))
    assert out.dtype == torch.uint32
    assert torch.equal(out.cpu().long(), expected)


@pytest.mark.parametrize("name", AT)
@pytest.mark.parametrize("num_indices", [0, 1, 3, philox.TRITON_BLOCK, philox.TRITON_BLOCK + 1, philox.NUMPY_CHUNK + 1])
def test_chosen_words_are_those_of_the_rows(name, num_indices, device):
    key, counter = random_rows(3)
    index = torch.randint(0, 2**34, (3, num_indices), generator=torch.Generator().manual_seed(1))
    out = AT[name](*(each.to(place(name, device)) for each in (key, counter, index)))
    assert torch.equal(out.cpu().long(), words_by_definition(key, counter, index))


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_python_integers_agree_with_the_reference(counter, key):
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high, low = divmod(0xCD9E8D57 * c2, 2**32)
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        c0, c1, c2, c3 = high ^ c1 ^ k0, low, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    out = philox_ref([torch.tensor(word) for word in counter], [torch.tensor(word) for word in key])
    assert [int(word) for word in out] == [c0, c1, c2, c3]


@pytest.mark.parametrize("name", ROWS)
def test_strided_inputs_are_read_by_their_strides(name, device):
    key, counter = random_rows(6)
    key, counter = (each.to(place(name, device)) for each in (key, counter))
    alone = ROWS[name](key[::2].contiguous(), counter[::2].contiguous(), 9)
    assert torch.equal(ROWS[name](key[::2], counter[::2], 9).long(), alone.long())


@pytest.mark.parametrize(
    ("key", "counter", "message"),
    [
        pytest.param(torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), r"key must be int64 \[R, 2\]", id="key-width"),
        pytest.param(torch.zeros(1, 2), torch.zeros(1, 3).long(), "got torch.float32", id="key-dtype"),
        pytest.param(torch.zeros(1, 2).long(), torch.zeros(3).long(), r"counter must be int64 \[R, 3\]", id="flat"),
        pytest.param(torch.zeros(1, 2).long(), torch.zeros(2, 3).long(), "as many rows", id="row-counts"),
    ],
)
def test_bad_rows_are_named(key, counter, message):
    with pytest.raises(ValueError, match=message):
        philox_rows(key, counter, 4)
    with pytest.raises(ValueError, match=message):
        philox_at(key, counter, torch.zeros(1, 1).long())


def test_bad_indices_are_named():
    key, counter = random_rows(2)
    with pytest.raises(ValueError, match=r"index must be int64 \[2, n\] on cpu, got torch.int64 \(3, 1\)"):
        philox_at(key, counter, torch.zeros(3, 1).long())


def test_without_triton_kernels_import_and_say_what_is_missing():
    program = """
import sys
sys.modules["triton"] = None  # the import system's mark for a package that is not there
import torch
from dspark.kernels import HAS_TRITON, philox
assert not HAS_TRITON
key, counter = torch.zeros(1, 2).long(), torch.zeros(1, 3).long()
assert philox.philox_rows(key, counter, 1).tolist() == [[0x6627E8D5]]
try:
    philox._rows_triton(key, counter, 1)
except RuntimeError as error:
    assert "Triton is not installed" in str(error), error
else:
    raise AssertionError("launched a kernel without Triton")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
