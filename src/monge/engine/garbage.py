"""Long pauses for garbage, since torch and transformers have many objects, and memory that the allocator keeps."""

import ctypes
import gc
import os


def settle_objects() -> None:
    """Leave all objects that live by now out of later collections, which with them would take as long as hundreds of rounds.

    For programs of our own, once networks are loaded: which objects last is not for a library to
    say. `gc.unfreeze` undoes it.
    """
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Give memory that is free back to the system, where the C library can (glibc).

    It takes milliseconds.

    Activations of long prompts leave holes of up to 32 MB in the heap, which glibc keeps otherwise.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
