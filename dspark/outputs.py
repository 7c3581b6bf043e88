"""Whether results can be written where a command line says, asked before the work that they cost."""

import os
from pathlib import Path
from tempfile import TemporaryFile


def check_output(flag: str, path: Path, is_file: bool = False) -> None:
    """Refuse a place that cannot be written to; nothing is left there.

    Args:
        flag: what named the path.
        path: the place.
        is_file: whether a file is to be written, in a folder that is there; else it is a folder, which may be missing
            together with folders above it.

    Raises:
        ValueError: with the flag, the path and the reason.
    """
    if is_file and path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; expected a file to write")
    place = path.absolute().parent if is_file else path.absolute()
    if is_file and not place.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent} to write the file to")
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        found = "is no folder" if place == path.absolute() else f"lies in {place}, which is no folder"
        raise ValueError(f"{flag} {path} {found}; expected one, which is made if it is not there")
    reason = None
    is_stream = is_file and path.exists() and not path.is_file()  # a pipe or device, written to whatever its folder
    if is_file and path.exists() and not os.access(path, os.W_OK):
        reason = "the file that is there is write-protected"
    elif not is_stream:
        try:
            with TemporaryFile(dir=place):  # permissions alone do not tell of read-only mounts and quotas
                pass
        except OSError as error:
            reason = f"no file can be made in {place} ({error.strerror})"
    if reason is not None:
        raise ValueError(f"{flag} {path} cannot be written: {reason}. Name another place, or change its permissions")
