"""Records on disk: one .npz a probe run, its arrays and the record as JSON text in the array ``record``."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4hw.probes.base import Array, ProbeResult
from nvfp4ref.container import foreign


def save(path: Path, result: ProbeResult) -> None:
    """Write a result's record and arrays; the file appears complete or not at all."""
    text = np.frombuffer(json.dumps(result.record, sort_keys=True).encode(), np.uint8)
    stream = io.BytesIO()
    np.savez_compressed(stream, record=text, **result.arrays)  # type: ignore[arg-type]
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(stream.getvalue())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """The record and the arrays of a file.  ValueError when it is no such file, or is damaged."""
    with foreign(f"{path}: cannot be read"):
        data = path.read_bytes()
    with foreign(f"{path} is no record of a probe"):
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        record = json.loads(arrays.pop("record").tobytes())
    if not isinstance(record, dict):
        raise ValueError(f"{path} is no record of a probe: its record is {type(record).__name__}")
    return record, arrays
