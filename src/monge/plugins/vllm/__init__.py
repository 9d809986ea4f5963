"""The plugin for vLLM: exact verification of vLLM's drafts, and drafters that need no network.

`additional_config={"monge": {...}}` holds all settings, see `settings.EngineSettings`. Without it
nothing changes. vLLM loads `hooks` in all of its processes, so the drafters are imported when used.
"""

import typing

if typing.TYPE_CHECKING:
    from monge.plugins.vllm.proposer import Proposer as Proposer

__all__ = ["Proposer"]


def __getattr__(name: str) -> object:
    if name != "Proposer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from monge.plugins.vllm.proposer import Proposer

    return Proposer
