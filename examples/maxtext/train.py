"""MaxText with quantization=te_nvfp4 where there is no Blackwell, each quantized tensor re-checked by the oracle.

    python examples/maxtext/train.py [config.yml] [key=value ...]

Arguments are MaxText's, nvfp4.yml beside this file being the default configuration.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jax

from nvfp4hw.jaxpath import maxtext
from nvfp4hw.jaxpath.check import check
from nvfp4hw.jaxpath.linear import Call, observed


def train(arguments: list[str]) -> list[Call]:
    """Train, and what every quantized linear layer did in every step."""
    try:
        maxtext.install()
    except ImportError as error:
        sys.exit(f"MaxText 0.2.5 on Python 3.12 is needed, installed by its own guide: {error}")
    logger = logging.getLogger("absl")  # MaxText prints all of its configuration there; the losses are wanted
    logger.addFilter(lambda record: record.levelno > logging.INFO or "completed step" in record.getMessage())
    logger.setLevel(logging.INFO)
    from maxtext.trainers.pre_train import train as pre_train

    calls: list[Call] = []
    with observed(calls.append):
        pre_train.main(["train.py", *arguments])
        jax.effects_barrier()
    return calls


def main(arguments: list[str]) -> int:
    """1 when something differs from the oracle, no layer was quantized, or random words repeat."""
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    if not arguments or not arguments[0].endswith(".yml"):
        arguments = [str(Path(__file__).with_name("nvfp4.yml")), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        if not any(argument.startswith("base_output_directory=") for argument in arguments):
            arguments = [*arguments, f"base_output_directory={folder}"]
        calls = train(arguments)
    wrong: Counter[str] = Counter()
    for call in calls:
        wrong.update(check(call))
    if not calls:
        print("no layer was quantized: say quantization=te_nvfp4 or quantization=te_nvfp4_no_rht")
        return 1
    keys = [call.keys.tobytes() for call in calls if call.keys is not None]
    words = len(set(keys))
    print(f"{len(calls)} calls of quantized layers, {words} sets of random words; differences from the oracle:")
    for name, count in wrong.items():
        print(f"  {name:10}{count:8}")
    if words < len(keys):
        print("random words repeat: set scan_layers=false")
    return int(any(wrong.values()) or words < len(keys))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
