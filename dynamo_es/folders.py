"""Why a folder cannot be made or used, in words that tell whoever named it what is in the way. Makes nothing."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def obstacle(folder: Path) -> str | None:
    """What keeps this user from making ``folder`` and writing into it; None if nothing can be seen beforehand."""
    absolute = folder.absolute()
    for place in (absolute, *absolute.parents):
        try:
            mode = place.stat().st_mode
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            if os.path.islink(place):
                return f"{place} is a link to something that is not there ({error.strerror})"
            continue
        except OSError as error:
            return f"{place}: {error.strerror}"
        return _why_closed(place, mode)
    return None


def _why_closed(place: Path, mode: int) -> str | None:
    """What forbids this user to make something in ``place``, which is there."""
    if not stat.S_ISDIR(mode):
        return f"{place} is not a folder"
    if os.access(place, os.W_OK | os.X_OK):
        return None
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return f"{place} is on a read-only file system"
    return f"this user may not write to {place}"


def why_not_made(folder: Path, error: OSError) -> str:
    """What was in the way when making ``folder`` failed with ``error``."""
    seen = obstacle(folder)
    if seen is not None:
        return seen
    absolute = folder.absolute()
    parent = next((place for place in absolute.parents if os.path.isdir(place)), absolute)
    # A file system of the kernel (/proc, /sys) says of a new folder that it does not exist, or that it is forbidden.
    reason = "its file system takes no folders" if error.errno == errno.ENOENT else error.strerror or str(error)
    return f"no folder can be made in {parent} ({reason})"
