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
from functools import partial
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
    """Attention and MLP; every linear layer takes ``dot_general_cls``, the products of activations stay as they are."""

    dot_general_cls: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        dense = partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.dot_general_cls)
        heads = dense(3 * WIDTH, name="qkv")(nn.RMSNorm(dtype=jnp.bfloat16)(x)).reshape(*x.shape[:2], 3, HEADS, -1)
        mixed = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        x = x + dense(WIDTH, name="out")(mixed.reshape(x.shape))
        up = dense(4 * WIDTH, name="up")(nn.RMSNorm(dtype=jnp.bfloat16)(x))
        return x + dense(WIDTH, name="down")(jnp.square(nn.relu(up))), None


class Model(nn.Module):
    """A decoder over bytes; embedding and output layer are never quantized."""

    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        place = self.param("place", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.Embed(BYTES, WIDTH, dtype=jnp.bfloat16)(tokens) + place.astype(jnp.bfloat16)
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True, STREAM: True}, length=BLOCKS)
        x, _ = blocks(self.dot_general_cls, name="blocks")(x, None)
        return nn.Dense(BYTES, use_bias=False)(nn.RMSNorm()(x).astype(jnp.float32))


def batches(text: bytes, seed: int = 0) -> Iterator[jax.Array]:
    """(BATCH, LENGTH + 1) bytes from random places."""
    data, random = np.frombuffer(text, np.uint8), np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(data) - LENGTH, BATCH)
        yield jnp.asarray(np.stack([data[start : start + LENGTH + 1] for start in starts]).astype(np.int32))


def train(
    recipe: str | None, steps: int, text: bytes, report: Callable[[int, float], None] = lambda step, loss: None
) -> list[float]:
    """The losses of a run, nats a byte; ``recipe`` None trains in bfloat16."""
    model = Model(None if recipe is None else make_dot_general_cls(recipe, kind="mlp"))
    optimizer = optax.adamw(3e-3)
    root = jax.random.key(0)
    data = batches(text)
    weights = jax.jit(Model().init)(root, next(data)[:, :-1])  # the same for every recipe
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, state: Any, tokens: jax.Array, key: Any) -> tuple[Any, Any, jax.Array]:
        def loss(weights: Any) -> jax.Array:
            logits = model.apply(weights, tokens[:, :-1], rngs={STREAM: key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state, value

    losses = []
    for number in range(steps):
        weights, state, value = step(weights, state, next(data), jax.random.fold_in(root, number))
        losses.append(float(value))
        report(number, losses[-1])
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description="A Flax model in bfloat16 and in emulated NVFP4.")
    parser.add_argument("--recipe", default="te_nvfp4", help="a recipe of nvfp4ref.recipe")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "LICENSE", help="what is learnt")
    options = parser.parse_args()
    text = options.text.read_bytes()
    if len(text) <= LENGTH + 1 or options.steps < 1:
        parser.error(f"a text of more than {LENGTH + 1} bytes and at least one step are needed")

    def progress(step: int, loss: float) -> None:
        if sys.stderr.isatty():
            print(f"\rstep {step + 1} of {options.steps}, loss {loss:.3f}", end="", file=sys.stderr)

    runs = {name: train(name, options.steps, text, progress) for name in (None, options.recipe)}
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    print(f"{'step':>6}" + "".join(f"{name or 'bfloat16':>18}" for name in runs) + "   loss, nats a byte")
    for number in range(0, options.steps, max(1, options.steps // 10)):
        print(f"{number + 1:6}" + "".join(f"{losses[number]:18.4f}" for losses in runs.values()))
    last = {name: np.mean(losses[-20:]) for name, losses in runs.items()}
    print("last 20" + "".join(f"{mean:17.4f} " for mean in last.values()).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
