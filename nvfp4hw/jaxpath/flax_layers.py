"""NVFP4 in Flax: a ``dot_general_cls`` for flax.linen, a ``dot_general`` for flax.nnx.Linear.

Both read a key for the stochastic rounding of gradients from an rng stream, "sr_rng" as in Transformer Engine, or
Flax's fallback for a stream that was not given.  Give each step its own key; the module's place makes it the layer's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nvfp4hw.jaxpath.linear import dot_general
from nvfp4ref.recipe import Recipe, recipe

STREAM = "sr_rng"


def _product(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    key: Any,
    chosen: Recipe,
    place: tuple[str, int, int],
    preferred_element_type: Any,
) -> jax.Array:
    """The quantized product, or where the recipe leaves this layer in high precision a bfloat16 one."""
    if chosen.quantizes(*place):
        y = dot_general(lhs, rhs, dimension_numbers, key, chosen)
    else:
        y = lax.dot_general(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), dimension_numbers)
    return y if preferred_element_type is None else y.astype(preferred_element_type)


class NVFP4DotGeneral(nn.Module):
    """The dot_general of one linen layer, which makes one of it in each call (``dot_general_cls``).

    Attributes:
        recipe: a name of ``nvfp4ref.recipe`` or a Recipe.
        kind, block, blocks: what the layer is, for recipes that keep some in high precision (``Recipe.quantizes``).
        stream: the rng stream of the keys.
    """

    recipe: str | Recipe = "te"
    kind: str = "mlp"
    block: int = 0
    blocks: int = 1
    stream: str = STREAM

    @nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **_: Any,
    ) -> jax.Array:
        """(tokens …, output features …), bfloat16 unless ``preferred_element_type`` says otherwise."""
        key = self.make_rng(self.stream) if self.has_rng(self.stream) or self.has_rng("params") else None
        place = (self.kind, self.block, self.blocks)
        return _product(lhs, rhs, dimension_numbers, key, recipe(self.recipe), place, preferred_element_type)


def make_dot_general_cls(recipe_: str | Recipe = "te", **attributes: Any) -> Any:
    """For ``flax.linen`` layers: ``nn.Dense(features, dot_general_cls=make_dot_general_cls("te_nvfp4"))``.

    ``attributes`` are those of NVFP4DotGeneral.  Raises ValueError for an unknown recipe.
    """
    return partial(NVFP4DotGeneral, recipe=recipe(recipe_), **attributes)


class NnxDotGeneral(nnx.Module):
    """The dot_general of one layer: ``nnx.Linear(i, o, dot_general=NnxDotGeneral("te_nvfp4", rngs), rngs=rngs)``.

    It has a stream of keys of its own, split from ``rngs``, which is part of the model's state and counts the calls.
    """

    def __init__(
        self,
        recipe_: str | Recipe,
        rngs: nnx.Rngs | None = None,
        *,
        kind: str = "mlp",
        block: int = 0,
        blocks: int = 1,
    ) -> None:
        self.recipe = recipe(recipe_)
        self.place = (kind, block, blocks)
        self.keys = None if rngs is None else nnx.Rngs(**{STREAM: rngs[STREAM]()})

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **_: Any,
    ) -> jax.Array:
        """As NVFP4DotGeneral."""
        key = None if self.keys is None else self.keys[STREAM]()
        return _product(lhs, rhs, dimension_numbers, key, self.recipe, self.place, preferred_element_type)
