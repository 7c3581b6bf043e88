"""`dspark inspect --target` accounts for the recurrent state of a target that has some."""

import json
import warnings

import torch
from checkpoints_util import write_deepspec
from kimi import kimi_model

from dspark.cli import main
from dspark.memory import SCHEMES, RecurrentSizes, recurrent_memory


def test_bytes_a_request_are_listed_for_every_way_of_undoing(tmp_path, capsys, monkeypatch):
    model = kimi_model(dtype=torch.float32)
    model.save_pretrained(tmp_path / "target")
    write_deepspec(tmp_path / "drafter")
    monkeypatch.setattr("dspark.target.AutoTokenizer.from_pretrained", lambda path, **options: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(["inspect", str(tmp_path / "drafter"), "--target", str(tmp_path / "target"), "--json"])
    report = json.loads(capsys.readouterr().out)
    sizes = RecurrentSizes.from_config(model.config)
    assert [line.split(":")[0] for line in report["recurrent_memory"]] == list(SCHEMES)
    for scheme, line in zip(SCHEMES, report["recurrent_memory"], strict=True):
        total = recurrent_memory(sizes, 4, scheme).total  # the tiny drafter has four rows
        assert f"{total / 2**20:.2f} MiB a request" in line
