"""NVFP4Array, what quantize returns, and the checks that run while JAX traces."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4ref as nv
from nvfp4ref import arrays

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
#: the fields of Arithmetic that may differ from the preset "te"
FIELDS = ("name", "e4m3_max", "headroom", "row_scaled", "four_over_six", "four_over_six_fast_error", "stochastic")
RULES = ("sm100", "te-fallback", "ideal")
Function = TypeVar("Function", bound=Callable[..., Any])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class NVFP4Array:
    """A quantized array; a pytree, so that it passes through jit, vmap and scan.

    Attributes:
        packed: uint8 (…, K/2), two E2M1 codes a byte, the even element in the low nibble.
        scales: uint8 (…, K/16), E4M3 bytes; 16x16 blocks have each tile's byte in all 16 rows.
        amax: float32, () or (rows,) when row-scaled.
        block, arithmetic: how it was made; static.
    """

    packed: jax.Array
    scales: jax.Array
    amax: jax.Array
    block: tuple[int, int] = field(default=(1, 16), metadata={"static": True})
    arithmetic: nv.Arithmetic = field(default_factory=nv.Arithmetic, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape (…, K)."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)

    @property
    def codes(self) -> jax.Array:
        """uint8 (…, K), one E2M1 code 0..15 an element."""
        return jnp.stack([self.packed & np.uint8(15), self.packed >> np.uint8(4)], axis=-1).reshape(self.shape)

    def to_numpy(self) -> nv.NVFP4Tensor:
        """The same tensor for the oracle, outside of jit."""
        packed, scales, amax = (np.asarray(a) for a in (self.packed, self.scales, self.amax))
        return nv.NVFP4Tensor(packed, scales, amax, self.block, self.arithmetic)


def supported(arithmetic: str | nv.Arithmetic) -> nv.Arithmetic:
    """The Arithmetic of that name; ValueError when the JAX path lacks one of its fields.

    It has Transformer Engine's CUDA arithmetic and what its recipe switches on: ``e4m3_max``, ``four_over_six`` and
    its fast error, ``row_scaled``, ``headroom``, and the stochastic rules "sm100", "te-fallback" and "ideal".
    """
    if not isinstance(arithmetic, (str, nv.Arithmetic)):
        raise TypeError(f"arithmetic is a preset's name or an nvfp4ref.Arithmetic; got {type(arithmetic).__name__}")
    ar, base = nv.arithmetic(arithmetic), nv.Arithmetic()
    names = [f.name for f in dataclasses.fields(ar) if f.name not in FIELDS]
    others = [f"{name}={getattr(ar, name)!r}" for name in names if getattr(ar, name) != getattr(base, name)]
    if ar.stochastic not in RULES:
        others.append(f"stochastic={ar.stochastic!r}")
    if others:
        raise ValueError(
            f"the JAX path computes Transformer Engine's CUDA arithmetic; it lacks {', '.join(others)} "
            f"(arithmetic {ar.name!r}): use nvfp4ref.quantize"
        )
    return ar


def as_array(x: Any, axis: int, block: tuple[int, int]) -> jax.Array:
    """x as a JAX array fit for blocks along that axis; TypeError or ValueError that says what to do."""
    if not isinstance(x, jax.Array):
        x = arrays.narrow(arrays.as_array(x))
    require_no_explicit_axes(x, "x")
    if x.dtype not in DTYPES:
        raise TypeError(f"expected float32, bfloat16 or float16; got dtype {x.dtype}: round it yourself first")
    if axis not in (-1, 0):
        raise ValueError(f"axis is -1 (rowwise) or 0 (columnwise: the transpose of a matrix); got {axis!r}")
    shape = tuple(x.shape)
    if len(shape) < 2 or 0 in shape:
        raise ValueError(f"expected a matrix or more dimensions, not empty; got shape {shape}")
    if axis == 0 and len(shape) != 2:
        raise ValueError(f"axis=0 quantizes the transpose of a matrix; got shape {shape}: reshape it to two dimensions")
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    for length, name, needed in (
        (columns, "columns", axis == -1 or block == (16, 16)),
        (rows, "rows", axis == 0 or block == (16, 16)),
    ):
        if needed and length % 16:
            raise ValueError(
                f"shape {shape} has {length} {name}, not a multiple of 16, which {block[0]}x{block[1]} blocks "
                f"along axis {axis} need; pad with zeros to {-(-length // 16) * 16} {name}"
            )
    return jnp.asarray(x)


def own_settings(function: Function) -> Function:
    """The function under JAX's own settings, whatever the user's say of promotion and of the precision of products."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        settings = (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            jax.default_matmul_precision("default"),
        )
        with settings[0], settings[1], settings[2]:
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def without_gradient(x: jax.Array, what: str) -> jax.Array:
    """x, through which no gradient is to pass: it would be zero, unseen, since what follows is integers."""
    return x


@without_gradient.defjvp
def _(what: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"{what} has no gradient: differentiate linear or fake_quantize, or hold it fixed with jax.lax.stop_gradient"
    )


def require_no_explicit_axes(x: jax.Array, name: str) -> None:
    """ValueError for an array that is sharded over a mesh with explicit axes, which reshapes here cannot follow."""
    if not isinstance(x, jax.Array):
        return
    sharding: Any = getattr(jax.typeof(x), "sharding", None)
    explicit = [
        axis
        for part in getattr(sharding, "spec", None) or ()
        for axis in ((part,) if isinstance(part, str) else part or ())
        if "Explicit" in str(dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))[axis])
    ]
    if explicit:
        raise ValueError(
            f"{name} is sharded over a mesh with the explicit axes {explicit}: call this inside jax.shard_map, with "
            "across=, or make the mesh with axis_types=(jax.sharding.AxisType.Auto,) for each axis"
        )
