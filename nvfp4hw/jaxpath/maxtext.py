"""MaxText's ``quantization=te_nvfp4`` and ``te_nvfp4_no_rht`` on this path, where there is no Blackwell.

MaxText asks ``configure_quantization`` for an object with ``dot_general_cls`` and hands it to its linear layers;
``install`` answers for the two names and leaves the others to MaxText.  Read and tested with MaxText 0.2.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvfp4ref.recipe import recipe

NAMES = ("te_nvfp4", "te_nvfp4_no_rht")


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


def install() -> None:
    """Make MaxText answer ``quantization=te_nvfp4`` and ``te_nvfp4_no_rht`` with this path in this process.

    Raises ImportError when MaxText is not installed.
    """
    from maxtext.layers import quantizations

    original = quantizations.configure_quantization
    if getattr(original, "answers_nvfp4", False):
        return

    def configure_quantization(config: Any, quant_mode_str: str = "train") -> Any:
        if config.quantization in NAMES:
            return NVFP4Quantization(config.quantization)
        return original(config, quant_mode_str)

    configure_quantization.answers_nvfp4 = True  # type: ignore[attr-defined]
    quantizations.configure_quantization = configure_quantization
