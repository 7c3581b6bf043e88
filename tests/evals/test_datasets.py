"""Prompt files, their errors, and what is put around a prompt."""

import hashlib
from types import SimpleNamespace

import pytest
from tiny_target import tiny_tokenizer
from tokenizers import processors

from dspark.evals.datasets import (
    PromptFormat,
    check_datasets,
    format_prompt,
    load_dataset,
    packaged_datasets,
    prompt_sha256,
    resolve_prompt_format,
)

SWITCHED = "{% if enable_thinking %}<think>{% else %}<plain>{% endif %}{{ messages[0]['content'] }}"


def target(template=None) -> SimpleNamespace:
    """A target that is nothing but a tokenizer; `template` None keeps the tokenizer's own."""
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return SimpleNamespace(tokenizer=tokenizer)


def raw_target() -> SimpleNamespace:
    bare = target()
    bare.tokenizer.chat_template = None
    return bare


def write(folder, *lines):
    path = folder / "set.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_packaged_set_has_twelve_prompts_of_each_domain():
    assert packaged_datasets() == ["default"]
    prompts = load_dataset("default").prompts
    assert [p.index for p in prompts] == list(range(36))
    assert {d: sum(p.domain == d for p in prompts) for d in ("math", "code", "chat")} == dict.fromkeys(
        ("math", "code", "chat"), 12
    )
    assert len({p.text for p in prompts}) == 36


def test_both_row_forms_the_first_turn_and_blank_lines(tmp_path):
    path = write(tmp_path, '{"prompt": "a", "source": "x"}', "", '{"turns": ["b", "then c"], "domain": "chat"}')
    dataset = load_dataset(path)
    assert [(p.index, p.text, p.domain) for p in dataset.prompts] == [(0, "a", None), (1, "b", "chat")]
    assert dataset.name == "set"
    assert dataset.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_limit_shortens_the_prompts_and_not_the_digest(tmp_path):
    path = write(tmp_path, '{"prompt": "a"}', '{"prompt": "b"}')
    assert [p.text for p in load_dataset(path, limit=1).prompts] == ["a"]
    assert load_dataset(path, limit=1).sha256 == load_dataset(path).sha256
    assert len(load_dataset(path, limit=9).prompts) == 2
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        load_dataset(path, limit=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param('{"prompt": ', "not valid JSON", id="torn"),
        pytest.param('["a"]', "a JSON list", id="not-an-object"),
        pytest.param('{"text": "a"}', r"found neither \(fields: text\)", id="other-field"),
        pytest.param('{"prompt": "a", "turns": ["a"]}', "found both", id="both-fields"),
        pytest.param('{"turns": []}', "at least one string, got \\[\\]", id="no-turns"),
        pytest.param('{"turns": "a"}', "turns must be a list", id="turns-not-a-list"),
        pytest.param('{"turns": [3]}', "not blank, got 3", id="turn-not-a-string"),
        pytest.param('{"prompt": "  "}', "not blank", id="blank"),
        pytest.param('{"prompt": "a", "domain": 1}', "domain must be a string, got 1", id="domain"),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, message):
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(ValueError, match=message) as error:
        load_dataset(path)
    assert str(error.value).startswith(f"{path}:2: ")


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ValueError, match=r"no data set 'defualt': it is neither a packaged set \(default\) nor"):
        load_dataset("defualt")
    with pytest.raises(ValueError, match="holds no prompt; expected one JSON object a line"):
        load_dataset(write(tmp_path, ""))


def test_chat_format_is_the_template_with_the_generation_prompt():
    chat = target()
    found = resolve_prompt_format(chat)
    assert (found.mode, found.thinking) == ("chat", None)
    assert found.template_sha256 == hashlib.sha256(chat.tokenizer.chat_template.encode()).hexdigest()
    text = chat.tokenizer.decode(format_prompt(chat, "hi"))
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>system") == 1


def test_the_thinking_switch_is_off_unless_asked_for():
    switched = target(SWITCHED)
    assert resolve_prompt_format(switched).thinking is False
    assert switched.tokenizer.decode(format_prompt(switched, "hi")) == "<plain>hi"
    thinking = resolve_prompt_format(switched, thinking=True)
    assert switched.tokenizer.decode(format_prompt(switched, "hi", thinking)) == "<think>hi"


def test_special_tokens_come_from_the_template_or_from_the_tokenizer_but_not_from_both():
    """A tokenizer that puts its begin token before every text, as Llama's does."""
    subject = target("<|im_start|>{{ messages[0]['content'] }}")
    begin = subject.tokenizer.bos_token_id
    subject.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    raw = format_prompt(subject, "hi", PromptFormat("raw"))
    assert raw[0] == begin
    assert format_prompt(subject, "hi") == raw


def test_raw_format_is_the_bare_text():
    assert resolve_prompt_format(raw_target()) == PromptFormat("raw")
    assert raw_target().tokenizer.decode(format_prompt(raw_target(), "hi")) == "hi"
    assert resolve_prompt_format(target(), "raw") == PromptFormat("raw")


@pytest.mark.parametrize(
    ("subject", "options", "message"),
    [
        pytest.param(raw_target, {"mode": "chat"}, "has no chat template", id="chat-without-template"),
        pytest.param(target, {"thinking": True}, "no enable_thinking switch", id="thinking-without-switch"),
        pytest.param(target, {"mode": "raw", "thinking": False}, "prompts are raw", id="thinking-with-raw-prompts"),
        pytest.param(target, {"mode": "template"}, "auto, chat, raw, got 'template'", id="unknown-mode"),
        pytest.param(lambda: SimpleNamespace(tokenizer=None), {}, "no tokenizer", id="no-tokenizer"),
    ],
)
def test_formats_that_nothing_would_apply_are_refused(subject, options, message):
    with pytest.raises(ValueError, match=message):
        resolve_prompt_format(subject(), **options)


def test_prompt_digest_tells_token_boundaries_apart():
    assert prompt_sha256([1, 23]) != prompt_sha256([12, 3])


def test_a_limit_above_the_size_of_a_set_is_said(tmp_path, caplog):
    path = write(tmp_path, '{"prompt": "a"}', '{"prompt": "b"}')
    with caplog.at_level("INFO"):
        assert check_datasets([str(path)], 2) == 2
        assert caplog.messages == []
        assert check_datasets([str(path)], 40) == 2
    assert caplog.messages == [f"--limit 40: {path.stem} has only 2 prompts, and all are taken"]
