"""MaxText's ``quantization=te_nvfp4`` and ``te_nvfp4_no_rht`` on this path, where there is no Blackwell.

MaxText asks ``configure_quantization`` for an object with ``dot_general_cls`` and hands it to its linear layers;
``install`` answers for the two names and leaves the others to MaxText.  Read and tested with MaxText 0.2.5.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from nvfp4ref.recipe import recipe

NAMES = ("te_nvfp4", "te_nvfp4_no_rht")
REFUSED = ("use_qwix_quantization", "use_batch_split_schedule")  # where MaxText asks no quantization object


@dataclass(frozen=True)
class NVFP4Quantization:
    """MaxText's Quantization interface for one of the two names; raises ValueError for another."""

    name: str
    quant_mode: str = "train"

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"the JAX path answers for quantization={' and '.join(NAMES)}; got {self.name!r}")

    @property
    def needs_apply_rngs(self) -> bool:
        """Whether keys are drawn in every step: for stochastic rounding."""
        return not recipe(self.name).disable_stochastic_rounding

    def get_block_size(self) -> int:
        """The number of tokens that MaxText initialises a layer with: the GEMMs sum over multiples of 32."""
        return 32

    def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()) -> Any:
        """The linen module class of a layer's product; the mesh axes are XLA's to handle."""
        from nvfp4hw.jaxpath.flax_layers import make_dot_general_cls

        return make_dot_general_cls(self.name)

    def einsum(self, *_: Any, **__: Any) -> Any:
        """Refused, as by Transformer Engine: only MoE and a quantized KV cache ask for it."""
        raise ValueError(f"quantization={self.name} has no einsum (MoE, KV cache): only linear layers are quantized")


def of_config(config: Any) -> NVFP4Quantization:
    """What MaxText's configuration asks for.

    Raises:
        ValueError: another quantization, or one of the two together with qwix or the batch-split schedule.
    Warns:
        UserWarning: ``scan_layers``, with which MaxText 0.2.5 keeps no generator state: each step has the same words;
            a mixture of experts, which are not quantized.
    """
    quantization = NVFP4Quantization(getattr(config.quantization, "value", config.quantization))  # an enumeration
    for name in REFUSED:
        if getattr(config, name, False):
            raise ValueError(f"quantization={quantization.name} does not go with {name}=true: set it to false")
    if quantization.needs_apply_rngs and getattr(config, "scan_layers", False):
        warnings.warn(
            "MaxText 0.2.5 drops the state of the random generators of scanned layers, so that every step rounds "
            "gradients with the same random words: set scan_layers=false",
            stacklevel=2,
        )
    if getattr(config, "num_experts", 1) > 1:
        warnings.warn("the experts of a mixture stay in high precision: only linear layers are quantized", stacklevel=2)
    return quantization


def install() -> None:
    """Make MaxText answer ``quantization=te_nvfp4`` and ``te_nvfp4_no_rht`` with this path in this process.

    Raises ImportError when MaxText is not installed.
    """
    from maxtext.layers import quantizations

    original = quantizations.configure_quantization
    if getattr(original, "answers_nvfp4", False):
        return

    def configure_quantization(config: Any, quant_mode_str: str = "train") -> Any:
        return of_config(config) if config.quantization in NAMES else original(config, quant_mode_str)

    configure_quantization.answers_nvfp4 = True  # type: ignore[attr-defined]
    quantizations.configure_quantization = configure_quantization
