"""What the C library's allocator does with memory that was freed; nothing where it is not glibc's.

Owns two settings of a process. Both are about pages: giving them back costs nothing until they are asked for again,
and then a fault each, which for a tensor of many megabytes takes longer than to compute what goes into it.
"""

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Names in glibc's malloc.h."""
MAX_MMAP_THRESHOLD_BYTES = 2**25
"""The largest that glibc takes: what is longer always goes back to the system."""


def trim_heap() -> None:
    """Give freed memory back to the system; takes milliseconds.

    For a process that has freed much and is about to need other memory, which would come on top.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_heap(num_bytes: int) -> None:
    """Keep up to so many freed bytes for the next tensors; call it before the process starts threads.

    For a process that again and again frees large tensors and makes new ones of the same size.
    """
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, num_bytes)
        mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_BYTES)
        mallopt(M_ARENA_MAX, 1)  # the heaps of further arenas are given back whatever the threshold
