"""Counter-based draws: token t of a vertex comes from a generator keyed (vertex seed, t).

A draw depends on nothing else: not on what else is in the batch, not on earlier draws, not on the
instance. A vertex that moves, or is made again, draws the same numbers (design, moving an
instance). The number is a keyed hash of the counter, which is what Philox does with fewer rounds
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11); blake2b is in the standard
library and costs about a microsecond.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

_COUNTER: Final = struct.Struct("<QQ")
_DOUBLE_BITS: Final = 53
_MASK_64: Final = (1 << 64) - 1


def uniform(seed: int, counter: int) -> float:
    """The `counter`-th number in [0, 1) of the generator with this seed: 53 uniform bits.

    Args:
        seed: Any integer; its low 64 bits count.
        counter: Index of the token in the response, from 0.
    """
    data = _COUNTER.pack(seed & _MASK_64, counter)
    bits = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return (bits >> (64 - _DOUBLE_BITS)) * 2.0**-_DOUBLE_BITS
