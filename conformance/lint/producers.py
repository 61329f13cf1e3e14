"""The bytes by which producers differ: what they store for zeros, and their smallest scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.lint.report import Finding, note
from nvfp4ref import e4m3
from nvfp4ref.container import counted

#: scales that producers give to blocks of zeros
ZERO_BLOCK = (0x00, 0x80, *range(0x01, 0x09), 0x20, 0x38)

#: what a producer stores for a block of zeros -> who
_ZERO_BLOCK_PRODUCERS = {
    0x00: "Transformer Engine, vLLM or FlashInfer",
    0x08: "torchao",
    0x20: "compressed-tensors",
    0x38: "ModelOpt",
}
#: the byte of an all-zero tensor's codes -> who
ZERO_TENSOR = {
    0x00: "Transformer Engine, compressed-tensors and others",
    0x77: "ModelOpt",
    0x88: "vLLM or jax.nn",
    0xCC: "torchao",
}


def check(fingerprints: list[dict[str, Any]]) -> Iterator[Finding]:
    """What the fingerprints of all tensors say together."""
    for byte, who in _ZERO_BLOCK_PRODUCERS.items():
        count = sum(f"0x{byte:02X}" in one.get("zero_block_scales", ()) for one in fingerprints)
        if count:
            yield note(
                "producer.zero-block",
                f"blocks of zeros have the scale 0x{byte:02X} ({e4m3.VALUES[byte]:g}) in {counted(count, 'tensor')}, "
                f"as {who} writes them",
                count,
                len(fingerprints),
            )
