"""Streamed text is the decoded text whatever the tokens cut through, and only a terminal sees marks."""

import io

import pytest
from tiny_target import tiny_tokenizer

from dspark.evals import measure_acceptance
from dspark.records import StepRecord
from dspark.terminal import ACCEPTED_ON, ACCEPTED_ON_PLAIN, MARK_OFF, MarkedWriter, TextStream, acceptance_lines


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def decode():
    return tiny_tokenizer().decode


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("plain words", id="one-byte-characters"),
        pytest.param("naïve 日本語 🙂!", id="characters-of-2-3-4-bytes"),
        pytest.param("🙂🙂", id="nothing-between"),
    ],
)
def test_pieces_add_up_and_no_character_is_cut(text: str, decode):
    stream = TextStream(decode)
    pieces = [stream.push(token_id) for token_id in tiny_tokenizer()(text).input_ids]
    assert "".join(pieces) == text
    assert stream.flush() == ""
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_an_unfinished_character_is_shown_at_the_end(decode):
    stream = TextStream(decode)
    pieces = [stream.push(token_id) for token_id in tiny_tokenizer()("a🙂").input_ids[:-1]]
    assert "".join(pieces) == "a"
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


class TestMarks:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)

    def written(self, out: io.StringIO, decode) -> str:
        writer = MarkedWriter(decode, out)
        writer.write(tiny_tokenizer()("abc").input_ids, num_accepted=2)
        writer.finish()
        return out.getvalue()

    def test_accepted_drafts_are_marked_on_a_terminal(self, decode):
        shown = self.written(Terminal(), decode)
        assert shown == f"{ACCEPTED_ON}a{MARK_OFF}{ACCEPTED_ON}b{MARK_OFF}c\n"

    def test_the_underline_stays_without_colours(self, decode, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("NO_COLOR", "1")
        assert self.written(Terminal(), decode).startswith(f"{ACCEPTED_ON_PLAIN}a{MARK_OFF}")

    def test_a_file_or_a_dumb_terminal_gets_the_bare_text(self, decode, monkeypatch: pytest.MonkeyPatch):
        assert self.written(io.StringIO(), decode) == "abc\n"
        monkeypatch.setenv("TERM", "dumb")
        assert self.written(Terminal(), decode) == "abc\n"


def test_figures_of_two_steps_by_hand():
    """Steps accept 2 of 2 and 0 of 2: both reach position 1 and one takes it, which then takes position 2."""
    steps = [
        StepRecord(position=5, num_offered=2, num_accepted=2, num_committed=3, accept_probs=(0.9, 0.8)),
        StepRecord(position=8, num_offered=2, num_accepted=0, num_committed=1, accept_probs=(0.3, 0.7)),
    ]
    lines = acceptance_lines(measure_acceptance([steps]))
    assert lines[0] == "4 tokens in 2 steps: 2.00 per step; 2 of 4 drafts accepted (50%)"
    assert [line.split()[-2:] for line in lines[1:]] == [["1", "2"], ["2", "1"], ["0.50", "1.00"], ["0.60", "0.80"]]


def test_one_of_a_kind_is_singular():
    steps = [StepRecord(position=5, num_offered=1, num_accepted=0, num_committed=1, accept_probs=(0.3,))]
    line = acceptance_lines(measure_acceptance([steps]))[0]
    assert line == "1 token in 1 step: 1.00 per step; 0 of 1 draft accepted (0%)"


def test_a_text_that_prefill_ended_has_no_step():
    assert acceptance_lines(measure_acceptance([[]])) == [
        "no step: the first token, which prefill gives, ended the text"
    ]
