"""Where compiled helpers are kept between runs: a folder of the user's that nobody else can write to."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path


def user_folder() -> Path | None:
    """The user's folder for compiled files, made when needed; None when it is not ours to trust or write."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not base or not os.path.isabs(base):
        return None
    folder = Path(base) / "nvfp4ref"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    # What is loaded from here runs as us: nobody else may be able to put a file there.
    shared = sys.platform != "win32" and (status.st_uid != os.getuid() or status.st_mode & 0o022)
    return None if shared or not os.access(folder, os.W_OK) else folder


@functools.cache
def temporary_folder() -> Path:
    """A private folder that lasts as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="nvfp4ref-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
