"""Importing single files of the installed ``transformer_engine`` without its compiled extensions.

The pure-Python wheel holds every file; only the packages' ``__init__`` files load an extension.  They are
replaced by packages that do nothing but know where their files are, the extension by the few names that the
wanted file looks up.  All of it leaves ``sys.modules`` again, so that the real package can still be imported.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "transformer_engine"
_LOCK = threading.RLock()


def module(name: str, **members: Any) -> ModuleType:
    """A module of that name with these members."""
    made = ModuleType(name)
    vars(made).update(members)
    return made


def import_file(name: str, packages: tuple[str, ...], modules: Mapping[str, ModuleType]) -> Any:
    """The installed module ``transformer_engine.<name>``, imported with stand-ins.

    Args:
        packages: dotted names under ``transformer_engine`` whose ``__init__`` is replaced.
        modules: further stand-ins by their full name.
    """
    root = Path(str(metadata.distribution("transformer-engine").locate_file(PACKAGE)))
    stand_ins = {PACKAGE: module(PACKAGE, __path__=[str(root)])}
    for package in packages:
        folder = str(root.joinpath(*package.split(".")))
        stand_ins[f"{PACKAGE}.{package}"] = module(f"{PACKAGE}.{package}", __path__=[folder])
    with _LOCK, _modules_replaced(stand_ins | dict(modules)):
        return importlib.import_module(f"{PACKAGE}.{name}")


@contextmanager
def _modules_replaced(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """``sys.modules`` with these in place of every Transformer Engine module; afterwards as it was."""

    def take_out() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name in modules or name.split(".")[0] == PACKAGE]
        return {name: sys.modules.pop(name) for name in names}

    before = take_out()
    sys.modules.update(modules)
    try:
        yield
    finally:
        take_out()
        sys.modules.update(before)
