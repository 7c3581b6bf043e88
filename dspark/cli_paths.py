"""Models, folders and files that a command line names: found, or refused before anything heavy is imported."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from dspark.config import HUB_ID
from dspark.default import EMBEDDED, TARGET_VARIABLE, default_drafter_path, local_target, resolve_default_target
from dspark.evals.datasets import find_dataset

USING_A_TARGET = ("generate", "eval", "quality", "profile", "doctor")
HUB_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # of targets: some have no owner


def name_models(options: argparse.Namespace) -> None:
    """Give models that were named by position the names of the flags: `target`, absent where none was named, and
    `drafter`, of `dspark quality` a list. A server's tokenizer that is named `embedded` becomes that target's path.

    Raises:
        ValueError: a drafter is missing, or there are several where one is expected.
    """
    if hasattr(options, "endpoint") and getattr(options, "target", None) == EMBEDDED:
        options.target = str(resolve_default_target().path)
    if not hasattr(options, "models"):
        return
    target, drafters = named_models(options.models, getattr(options, "target", None))
    if len(drafters) > 1 and options.command != "quality":
        raise ValueError(f"{len(options.models)} models were named: expected [TARGET] DRAFTER")
    options.drafter = drafters if options.command == "quality" else drafters[0]
    if target != EMBEDDED or len(options.models) > 1:
        options.target = target


def named_models(models: Sequence[str], target: str | None) -> tuple[str, list[str]]:
    """Target and drafters that the words of a command name.

    Args:
        models: nothing, DRAFTER, or TARGET DRAFTER...; with `target`, drafters only.
        target: value of --target.
    """
    if target is not None:
        if not models and target == EMBEDDED:
            return EMBEDDED, [EMBEDDED]
        if not models:
            raise ValueError(f"--target {target} needs a drafter: name one or more behind it")
        return target, list(models)
    if len(models) < 2:
        return EMBEDDED, list(models) or [EMBEDDED]
    return models[0], list(models[1:])


def named_target(options: argparse.Namespace) -> str | None:
    """The target that --target names; None without it and for the word `embedded`."""
    target = getattr(options, "target", None)
    return None if target == EMBEDDED else target


def check_paths(options: argparse.Namespace) -> None:
    """Refuse what leads nowhere: models, data sets, schedules, runs, and folders to write into.

    Raises:
        ValueError: with what was named and what was expected.
    """
    for drafter in _drafters(options):
        drafter_location(drafter)
    target = named_target(options)
    if target is None and options.command in USING_A_TARGET and not hasattr(options, "endpoint"):
        target = os.environ.get(TARGET_VARIABLE)
    if target and (Path(target).expanduser().exists() or not HUB_MODEL.fullmatch(target)):
        local_target(Path(target))
    for name in getattr(options, "dataset", ()):
        find_dataset(name)
    schedule = getattr(options, "schedule", None)
    if schedule is not None and not schedule.startswith("threshold:") and not Path(schedule).is_file():
        raise ValueError(
            f"--schedule {schedule!r} is neither threshold:P nor a file; `dspark profile --out FILE` makes a cost table"
        )
    for folder in (*getattr(options, "runs", ()), *getattr(options, "check", ())):
        if not Path(folder).expanduser().is_dir():
            raise ValueError(f"{folder} is no folder; expected one that dspark eval --out wrote")
    if options.command in ("eval", "report", "quality"):
        for name in ("out", "states"):
            output_folder(options, name)


def _drafters(options: argparse.Namespace) -> list[str | None]:
    """Drafters that a command will load, as they were named; None is the embedded one."""
    if getattr(options, "plain", False) or hasattr(options, "endpoint"):
        return []
    named = getattr(options, "source", None) or getattr(options, "drafter", None)
    if options.command in ("generate", "eval") and named is None:
        find_drafter(options)
    return list(named) if isinstance(named, list) else [named]


def find_drafter(options: argparse.Namespace) -> str | None:
    """Folder or Hub id of the drafter; None with --plain."""
    target_name, drafter_path = named_target(options), getattr(options, "drafter", None)
    if getattr(options, "plain", False):
        return None
    if target_name is not None and drafter_path is None:
        raise ValueError(
            f"--target {target_name} needs a --drafter: the embedded drafter reads the hidden states of "
            f"SmolLM2-135M-Instruct and was trained for no other model. If {target_name} is a copy of that model, "
            f"set {TARGET_VARIABLE}={target_name} and leave --target out"
        )
    return drafter_location(drafter_path)


def drafter_location(name: str | None) -> str:
    """Folder or Hub id of the drafter that a command line names; None and the word `embedded` are the embedded one.

    Raises:
        ValueError: a path that leads nowhere. It is a mistake of the command line, not a fault of a checkpoint.
    """
    if name is None or name == EMBEDDED:
        return str(default_drafter_path())
    if not Path(name).exists() and not HUB_ID.fullmatch(name):
        raise ValueError(
            f"drafter {name}: no such folder; expected an existing folder, a Hub id such as owner/name, or the word "
            f"{EMBEDDED}. Check the path"
        )
    return name


def output_folder(options: argparse.Namespace, name: str = "out") -> Path | None:
    """The folder that a flag names to write into; None without it.

    Raises:
        ValueError: it is a file.
    """
    if not hasattr(options, name):
        return None
    folder = Path(getattr(options, name))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--{name} {folder} is a file; expected a folder, which is made if it is not there")
    return folder
