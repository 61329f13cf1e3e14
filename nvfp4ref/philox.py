"""Philox4x32: the counter-based generator behind every stochastic kernel.  Rules PHILOX-ROUNDS, PHILOX-COUNTER.

A call turns a 128-bit counter and a 64-bit key into four 32-bit words.  Transformer Engine's counter is
(offset + call, sequence): the low half counts calls and carries into the high half, which holds the thread's
sequence number.  An offset here counts calls, that is 128-bit blocks, not 32-bit words as in cuRAND.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
CHUNK = 2**14  # counters worked on at a time: the state stays in the cache


def philox4x32(counter: ArrayLike, key: ArrayLike, rounds: int = 10) -> U32:
    """The four words of each counter.

    Args:
        counter: (…, 4) uint32; key: two uint32.
        rounds: 10 is Random123's and cuRAND's default (Transformer Engine: NVTE_BUILD_NUM_PHILOX_ROUNDS).
    Returns:
        uint32 (…, 4).
    """
    words = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    x, y, z, w = (np.array(part) for part in words)
    k0, k1 = (int(k) for k in np.asarray(key, np.uint64))
    for _ in range(rounds):
        product0, product1 = x * MULTIPLIERS[0], z * MULTIPLIERS[1]
        x, y = (product1 >> HALF) ^ y ^ np.uint64(k0), product1 & LOW
        z, w = (product0 >> HALF) ^ w ^ np.uint64(k1), product0 & LOW
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([x, y, z, w], axis=-1).astype(np.uint32)


def require_uint64(value: int, name: str) -> int:
    """``value`` when it is an integer of 0 … 2^64−1; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is an integer; got {type(value).__name__}")
    if not 0 <= value < 2**64:
        raise ValueError(f"{name} is 64 bits wide, 0 … 2^64−1; got {int(value)}")
    return int(value)


def require_rounds(rounds: int) -> None:
    """ValueError unless ``rounds`` is an integer from 1 to 32."""
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= 32:
        raise ValueError(f"rounds is an integer from 1 to 32 (10 by default); got {rounds!r}")


def calls(seed: int, offset: int, sequence: U64, call: U64, rounds: int = 10) -> U32:
    """The words of call number ``call`` of the threads ``sequence``: uint32 of their shape and (…, 4).

    offset + call past 2^64 carries into the sequence half (rule PHILOX-COUNTER).
    """
    seed, offset = require_uint64(seed, "seed"), require_uint64(offset, "offset")
    require_rounds(rounds)
    shape = np.broadcast_shapes(sequence.shape, call.shape)
    high_all, low_all = (np.broadcast_to(a, shape).reshape(-1) for a in (sequence, call))
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64)
    out = np.empty((low_all.size, 4), np.uint32)
    for start in range(0, low_all.size, CHUNK):
        part = slice(start, start + CHUNK)
        low = low_all[part] + np.uint64(offset)
        high = high_all[part] + (low < np.uint64(offset))
        counter = np.stack([low & LOW, low >> HALF, high & LOW, high >> HALF], axis=-1)
        out[part] = philox4x32(counter, key, rounds)
    return out.reshape(*shape, 4)
