"""Who gets what: the quantization of each operand of fprop, dgrad and wgrad, and which layers take part.

Rules RECIPE-FPROP, RECIPE-DGRAD, RECIPE-WGRAD, RECIPE-LAYERS.  The switches and their environment names are
those of Transformer Engine's NVFP4BlockScaling; what it refuses is refused here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .arithmetic import Arithmetic, arithmetic, of_name
from .hadamard import RHT

SCOPES = ("none", "weights", "activations", "all")
GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is quantized; keyword arguments of ``quantize`` but for the random words."""

    tensor: str  # "x", "w" or "dy"
    axis: int  # −1 rowwise, 0 columnwise
    block: tuple[int, int] = (1, 16)
    rounding: str = "nearest-even"
    rht: RHT | None = None
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    paired_with_rht: bool = False  # the same call also makes a columnwise output that is transformed

    def options(self) -> dict[str, Any]:
        """Keyword arguments for ``nvfp4ref.quantize``."""
        return {
            "axis": self.axis,
            "block": self.block,
            "rounding": self.rounding,
            "rht": self.rht,
            "arithmetic": self.arithmetic,
        }


@dataclass(frozen=True)
class Recipe:
    """One training recipe.

    Args:
        disable_rht, disable_stochastic_rounding, disable_2d_quantization, row_scaled_activation, nvfp4_4over6,
        nvfp4_4over6_e4m3_use_256, nvfp4_4over6_err_mode, backward_override: as in Transformer Engine.
        first_high_precision, last_high_precision: blocks at the ends whose linears stay in high precision.
        kinds: kinds of linear layers that are quantized: of "attention", "mlp" (and whatever a model names).
        arithmetic: the base arithmetic of every operand.
    Raises:
        ValueError: a combination that Transformer Engine refuses, or an unknown value.
    """

    name: str = "te"
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    backward_override: str | None = None
    first_high_precision: int = 0
    last_high_precision: int = 0
    kinds: tuple[str, ...] = ("attention", "mlp")
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    def __post_init__(self) -> None:
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            if getattr(self, name) not in SCOPES:
                raise ValueError(f"{name} is one of {', '.join(SCOPES)}; got {getattr(self, name)!r}")
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError(f"nvfp4_4over6_err_mode is MAE or MSE; got {self.nvfp4_4over6_err_mode!r}")
        if self.backward_override not in (None, "high_precision", "dequantized"):
            raise ValueError(
                f"backward_override is None, 'high_precision' or 'dequantized'; got {self.backward_override!r}"
            )
        if self.first_high_precision < 0 or self.last_high_precision < 0:
            raise ValueError("the numbers of blocks kept in high precision are not negative")
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise ValueError("4over6 on activations does not go with the Hadamard transform: set disable_rht=True")
        if self.row_scaled_activation and not self.disable_rht:
            raise ValueError("row-scaled activations do not go with the Hadamard transform: set disable_rht=True")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **changes: Any) -> Recipe:
        """The recipe that Transformer Engine's environment variables select (``os.environ`` by default)."""
        env = os.environ if environment is None else environment
        switches = {
            name: env.get(variable, "0") == "1"
            for name, variable in (
                ("disable_rht", "NVTE_NVFP4_DISABLE_RHT"),
                ("disable_stochastic_rounding", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"),
                ("disable_2d_quantization", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION"),
                ("row_scaled_activation", "NVTE_NVFP4_ROW_SCALED_ACTIVATION"),
            )
        }
        return cls(
            **{
                **switches,
                "nvfp4_4over6": env.get("NVTE_NVFP4_4OVER6", "none"),
                "nvfp4_4over6_e4m3_use_256": env.get("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all"),
                "nvfp4_4over6_err_mode": env.get("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE").upper(),
                "backward_override": env.get("NVTE_BACKWARD_OVERRIDE") or None,
                **changes,
            }
        )

    def operands(self, gemm: str) -> tuple[Operand, Operand]:
        """The two operands (a, b) of a GEMM a·bᵀ: "fprop" x·wᵀ, "dgrad" dy·w, "wgrad" dyᵀ·x."""
        if gemm == "fprop":
            return self._activation(-1), self._weight(-1)
        if gemm == "dgrad":
            return self._gradient(-1), self._weight(0)
        if gemm == "wgrad":
            return self._gradient(0), self._activation(0)
        raise ValueError(f"gemm is one of {', '.join(GEMMS)}; got {gemm!r}")

    def quantizes(self, kind: str, block: int, blocks: int) -> bool:
        """Whether a linear layer of this kind in block ``block`` of ``blocks`` is quantized (RECIPE-LAYERS)."""
        if not 0 <= block < blocks:
            raise ValueError(f"block is 0..{blocks - 1}; got {block}")
        inside = self.first_high_precision <= block < blocks - self.last_high_precision
        return inside and kind in self.kinds

    def _transform(self, axis: int) -> RHT | None:
        return RHT() if axis == 0 and not self.disable_rht else None

    def _four_over_six(self, scope: str) -> Arithmetic:
        """The arithmetic of a forward tensor, with 4over6 where the recipe selects it."""
        if self.nvfp4_4over6 not in (scope, "all"):
            return self.arithmetic
        use_256 = self.nvfp4_4over6_e4m3_use_256 in (scope, "all")
        return arithmetic(self.arithmetic, four_over_six=self.nvfp4_4over6_err_mode, e4m3_max=256 if use_256 else 448)

    def _activation(self, axis: int) -> Operand:
        ar = self._four_over_six("activations")
        if self.row_scaled_activation:
            if ar.four_over_six and axis == 0:
                raise ValueError("row-scaled 4over6 has no columnwise output, which wgrad needs")
            ar = arithmetic(ar, row_scaled=True)
        return Operand("x", axis, rht=self._transform(axis), arithmetic=ar)

    def _weight(self, axis: int) -> Operand:
        block = (1, 16) if self.disable_2d_quantization else (16, 16)
        return Operand("w", axis, block=block, arithmetic=self._four_over_six("weights"))

    def _gradient(self, axis: int) -> Operand:
        rounding = "nearest-even" if self.disable_stochastic_rounding else "stochastic"
        return Operand(
            "dy",
            axis,
            rounding=rounding,
            rht=self._transform(axis),
            arithmetic=self.arithmetic,
            paired_with_rht=not self.disable_rht,
        )


_TE = Recipe()

#: name -> Recipe.  Sources: docs/training.md
RECIPES: dict[str, Recipe] = {
    "te": _TE,
    # arXiv 2509.25149: of 62 blocks the first two and the last eight in high precision
    "paper": replace(_TE, name="paper", first_high_precision=2, last_high_precision=8),
    # MaxText: every linear of every decoder block
    "te_nvfp4": replace(_TE, name="te_nvfp4"),
    "te_nvfp4_no_rht": replace(_TE, name="te_nvfp4_no_rht", disable_rht=True),
    # NVIDIA's Llama 3 8B blog: the MLP only
    "mlp-only": replace(_TE, name="mlp-only", kinds=("mlp",)),
    # 4over6 on weights and activations excludes the transform
    "four-over-six": replace(_TE, name="four-over-six", nvfp4_4over6="all", disable_rht=True),
    "row-scaled": replace(_TE, name="row-scaled", row_scaled_activation=True, disable_rht=True),
}


def recipe(name: str | Recipe = "te", /, **changes: Any) -> Recipe:
    """A named recipe, or a Recipe, with fields replaced.

    Raises ValueError for an unknown name or combination, TypeError for an unknown field.
    """
    return of_name(name, RECIPES, "recipe; the recipes", changes)


__all__ = ["GEMMS", "RECIPES", "Operand", "Recipe", "recipe"]
