"""NVFP4 in Flax: a ``dot_general_cls`` for flax.linen, a ``dot_general`` for flax.nnx.Linear.

Both read a key for the stochastic rounding of gradients from an rng stream, "sr_rng" as in Transformer Engine, or
Flax's fallback for a stream that was not given.  Give each step its own key; the module's place makes it the layer's.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Layer:
    """What a recipe makes of one layer."""

    recipe: Recipe
    quantized: bool

    @property
    def takes_key(self) -> bool:
        """Whether differentiating it draws random words."""
        overridden = self.recipe.backward_override is not None
        return self.quantized and not overridden and not self.recipe.disable_stochastic_rounding

    def product(
        self,
        key: Any,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        preferred_element_type: Any = None,
        **others: Any,
    ) -> jax.Array:
        """The quantized product, or a bfloat16 one, in the dtype that ``jax.lax.dot_general`` would give."""
        if given := [name for name, value in others.items() if value is not None]:
            raise TypeError(f"a product in NVFP4 does not take {given[0]}; got {others[given[0]]!r}")
        if self.quantized:
            y = dot_general(lhs, rhs, dimension_numbers, key, self.recipe)
        else:
            y = lax.dot_general(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), dimension_numbers)
        return y.astype(preferred_element_type or jnp.result_type(lhs, rhs))


def _layer(recipe_: str | Recipe, kind: str, block: int | None, blocks: int | None) -> Layer:
    chosen = recipe(recipe_)
    if kind not in ("attention", "mlp", *chosen.kinds):
        raise ValueError(f"kind is 'attention' or 'mlp', of which the recipe {chosen.name!r} speaks; got {kind!r}")
    kept = chosen.first_high_precision + chosen.last_high_precision
    if block is not None and blocks is not None:
        if kept >= blocks:
            raise ValueError(
                f"the recipe {chosen.name!r} keeps {kept} blocks in high precision, and there are {blocks}: nothing "
                "would be quantized"
            )
        return Layer(chosen, chosen.quantizes(kind, block, blocks))
    if kept:
        raise ValueError(
            f"the recipe {chosen.name!r} keeps the first {chosen.first_high_precision} and the last "
            f"{chosen.last_high_precision} blocks in high precision: say block= and blocks= of each layer"
        )
    return Layer(chosen, kind in chosen.kinds)


class NVFP4DotGeneral(nn.Module):
    """The dot_general of one linen layer, which makes one of it in each call: see ``make_dot_general_cls``."""

    layer: Layer
    stream: str = STREAM

    @nn.compact
    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None, **others: Any
    ) -> jax.Array:
        """(tokens …, output features …): bfloat16 numbers in the dtype that ``jax.lax.dot_general`` would give.

        ``precision`` says nothing here.  Raises what ``linear`` raises, and TypeError for other arguments than
        ``preferred_element_type``.
        """
        drawn = self.layer.takes_key and (self.has_rng(self.stream) or self.has_rng("params"))
        key = self.make_rng(self.stream) if drawn else None
        try:
            return self.layer.product(key, lhs, rhs, dimension_numbers, **others)
        except (TypeError, ValueError) as error:
            error.add_note(f"in the Flax module {'/'.join(self.path)}")
            raise


def make_dot_general_cls(
    recipe_: str | Recipe = "te",
    *,
    kind: str = "mlp",
    block: int | None = None,
    blocks: int | None = None,
    stream: str = STREAM,
) -> Any:
    """For ``flax.linen`` layers: ``nn.Dense(features, dot_general_cls=make_dot_general_cls("te_nvfp4"))``.

    Args:
        recipe_: a name of ``nvfp4ref.recipe`` or a Recipe.
        kind: "attention", "mlp" or a name of your own, for recipes that quantize some kinds only.
        block, blocks: the layer's block and how many there are, for recipes that keep some in high precision.
        stream: the rng stream of the keys.
    Raises:
        ValueError: an unknown recipe, or one that asks for block and blocks where they are not given.
    """
    return partial(NVFP4DotGeneral, _layer(recipe_, kind, block, blocks), stream)


class NnxDotGeneral(nnx.Module):
    """The dot_general of one layer: ``nnx.Linear(i, o, dot_general=NnxDotGeneral("te_nvfp4", rngs), rngs=rngs)``.

    It has a stream of keys of its own, split from ``rngs``, which is part of the model's state and counts the calls.
    After ``model.eval()`` it draws none, so that a call changes no state; ``model.train()`` draws again.

    Args:
        recipe_, kind, block, blocks: those of ``make_dot_general_cls``.
        rngs: with a stream "sr_rng" or a default one; None is for recipes without stochastic rounding.
    Raises:
        ValueError: as there, and rngs without such a stream.
    """

    def __init__(
        self,
        recipe_: str | Recipe = "te",
        rngs: nnx.Rngs | None = None,
        *,
        kind: str = "mlp",
        block: int | None = None,
        blocks: int | None = None,
    ) -> None:
        self.layer = _layer(recipe_, kind, block, blocks)
        self.keys = _own_keys(rngs) if rngs is not None and self.layer.takes_key else None
        self.deterministic = False

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None, **others: Any
    ) -> jax.Array:
        """As NVFP4DotGeneral."""
        key = None if self.keys is None or self.deterministic else self.keys[STREAM]()
        return self.layer.product(key, lhs, rhs, dimension_numbers, **others)


def _own_keys(rngs: nnx.Rngs) -> nnx.Rngs:
    try:
        key = rngs[STREAM]()
    except KeyError:
        raise ValueError(
            f"rngs has neither a stream {STREAM!r} nor a default one for the keys of stochastic rounding: add one, as "
            f"nnx.Rngs(params=0, {STREAM}=1)"
        ) from None
    return nnx.Rngs(**{STREAM: key})
