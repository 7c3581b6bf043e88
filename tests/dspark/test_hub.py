"""Hub ids: what is fetched, in which order, and that nothing large is fetched for a repository that would be
refused."""

import json

import pytest
import torch
from checkpoints_util import write_checkpoint, write_deepspec
from huggingface_hub.errors import LocalEntryNotFoundError

from dspark.checkpoint import load_drafter
from dspark.families import CheckpointError, container


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one repository, `owner/name`, whose content a test writes to `tmp_path`; returns the requested
    patterns."""
    requests = []

    def snapshot_download(repository, allow_patterns):
        if repository != "owner/name":
            raise LocalEntryNotFoundError("no such repository")
        requests.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(container, "snapshot_download", snapshot_download)
    return requests


def test_a_repository_is_loaded_from_its_json_and_safetensors_files_only(hub, tmp_path):
    write_deepspec(tmp_path)
    assert load_drafter("owner/name").config.block_size == 4
    assert hub == [["*.json"], ["*.json", "*.safetensors"]]


def test_weights_of_an_unsupported_packaging_are_not_fetched(hub, tmp_path):
    write_checkpoint(tmp_path, {"model_type": "k3_dspark"}, {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"owner/name: .*K3 MLA"):
        load_drafter("owner/name")
    assert hub == [["*.json"]]


def test_a_target_with_an_embedded_drafter_is_told_by_its_index_before_its_weights_are_fetched(hub, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other", "dspark_block_size": 5}))
    (tmp_path / container.INDEX).write_text(json.dumps({"weight_map": {"mtp.0.main_proj.weight": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match="pass it as the target"):
        load_drafter("owner/name")
    assert hub == [["*.json"]]


def test_a_repository_that_cannot_be_reached_is_refused_with_the_reason(hub):
    with pytest.raises(CheckpointError, match=r"owner/other: not a folder here, .*no such repository"):
        load_drafter("owner/other")
