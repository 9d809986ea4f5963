"""Long pauses for garbage: a full collection looks at every object of a process, and torch and transformers have many."""

import gc


def settle_objects() -> None:
    """Leave all objects that live by now out of later collections, which with them would take as long as hundreds of rounds.

    For programs of our own, once networks are loaded: which objects last is not for a library to say. `gc.unfreeze` undoes it.
    """
    gc.collect()
    gc.freeze()
