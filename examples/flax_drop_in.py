"""A small Flax language model trained in bfloat16 and in emulated NVFP4: one argument of its Dense layers differs.

    pip install 'nvfp4ref[flax]'
    python examples/flax_drop_in.py [--recipe te_nvfp4] [--steps 200] [--text FILE]

The model predicts the next byte of a text, this project's licence by default.  Its blocks are one scanned Flax module,
so that XLA compiles a block once; each block draws its own keys from the stream "sr_rng".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from nvfp4hw.jaxpath.flax_layers import STREAM, make_dot_general_cls

BATCH, LENGTH, WIDTH, HEADS, BLOCKS, BYTES = 4, 64, 64, 4, 2, 256


class Block(nn.Module):
    """Attention and MLP; every linear layer is quantized, the products of activations stay as they are."""

    recipe: str | None

    def dense(self, features: int, name: str, kind: str) -> nn.Dense:
        dot = None if self.recipe is None else make_dot_general_cls(self.recipe, kind=kind)
        return nn.Dense(features, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=dot, name=name)

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        heads = self.dense(3 * WIDTH, "qkv", "attention")(nn.RMSNorm(dtype=jnp.bfloat16)(x))
        q, k, v = jnp.moveaxis(heads.reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dense(WIDTH, "out", "attention")(mixed.reshape(x.shape))
        up = self.dense(4 * WIDTH, "up", "mlp")(nn.RMSNorm(dtype=jnp.bfloat16)(x))
        return x + self.dense(WIDTH, "down", "mlp")(jnp.square(nn.relu(up))), None


class Model(nn.Module):
    """A decoder over bytes; embedding and output layer are never quantized."""

    recipe: str | None = None  # None: bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        place = self.param("place", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.Embed(BYTES, WIDTH, dtype=jnp.bfloat16)(tokens) + place.astype(jnp.bfloat16)
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True, STREAM: True}, length=BLOCKS)
        x, _ = blocks(self.recipe, name="blocks")(x, None)
        return nn.Dense(BYTES, use_bias=False)(nn.RMSNorm()(x).astype(jnp.float32))


def batches(text: bytes, seed: int = 0) -> Iterator[jax.Array]:
    """(BATCH, LENGTH + 1) bytes from random places."""
    data, random = np.frombuffer(text, np.uint8), np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(data) - LENGTH, BATCH)
        yield jnp.asarray(np.stack([data[start : start + LENGTH + 1] for start in starts]).astype(np.int32))


class Trainer:
    """A model under one recipe, None for bfloat16, with a compiled step; ``run`` starts anew each time."""

    def __init__(self, recipe: str | None) -> None:
        model, optimizer = Model(recipe), optax.adamw(3e-3)
        self.key = jax.random.key(0)
        example = jnp.zeros((BATCH, LENGTH), jnp.int32)
        self.weights = jax.jit(Model().init)(self.key, example)  # the same for every recipe
        self.state = optimizer.init(self.weights)

        @jax.jit
        def step(weights: Any, state: Any, tokens: jax.Array, key: Any) -> tuple[Any, Any, jax.Array]:
            def loss(weights: Any) -> jax.Array:
                logits = model.apply(weights, tokens[:, :-1], rngs={STREAM: key})
                return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

            value, gradient = jax.value_and_grad(loss)(weights)
            change, state = optimizer.update(gradient, state, weights)
            return optax.apply_updates(weights, change), state, value

        self.step = step

    def run(
        self, steps: int, text: bytes, report: Callable[[int, float], None] = lambda step, loss: None
    ) -> list[float]:
        """The loss of each step, nats a byte."""
        weights, state, losses = self.weights, self.state, []
        for number, tokens in zip(range(steps), batches(text), strict=False):
            weights, state, value = self.step(weights, state, tokens, jax.random.fold_in(self.key, number))
            losses.append(float(value))
            report(number, losses[-1])
        return losses


def main() -> int:
    parser = argparse.ArgumentParser(description="A Flax model in bfloat16 and in emulated NVFP4.")
    parser.add_argument("--recipe", default="te_nvfp4", help="a recipe of nvfp4ref.recipe")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "LICENSE", help="what is learnt")
    options = parser.parse_args()
    try:
        make_dot_general_cls(options.recipe)
        text = options.text.read_bytes()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if len(text) <= LENGTH or options.steps < 1:
        parser.error(f"a text of more than {LENGTH} bytes and at least one step are needed")

    def progress(step: int, loss: float) -> None:
        if sys.stderr.isatty():
            print(f"\rstep {step + 1} of {options.steps}, loss {loss:.3f}", end="", file=sys.stderr)

    runs = {name: Trainer(name).run(options.steps, text, progress) for name in (None, options.recipe)}
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    print(f"{'step':>7}" + "".join(f"{name or 'bfloat16':>18}" for name in runs) + "   loss, nats a byte")
    for number in range(0, options.steps, max(1, options.steps // 10)):
        print(f"{number + 1:7}" + "".join(f"{losses[number]:18.4f}" for losses in runs.values()))
    print(f"last {min(20, options.steps):2}" + "".join(f"{np.mean(losses[-20:]):18.4f}" for losses in runs.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
