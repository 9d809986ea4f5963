"""Modules by their former names, which this release takes: what moved is found where it lies now."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final


def _moved(former: str, present: str, names: str) -> dict[str, str]:
    return {f"monge.{former}.{name}": f"monge.{present}.{name}" for name in names.split()}


FORMER_MODULES: Final = {
    "monge.testing": "monge.oracle",
    "monge.testing.oracle": "monge.oracle.exact_law",
    **_moved("testing", "oracle", "decoding tabular"),
    "monge.core.model": "monge.networks.base",
    "monge.engine.models": "monge.networks",
    "monge.engine.models.masks": "monge.networks.attention_masks",
    **_moved("engine.models", "networks", "hf_chain hf_model hf_tree network_facts tree_cache"),
    **_moved("core", "laws", "clocks draws law lazy_laws levels proposal quantiles top_p tree"),
    **_moved("engine", "networks", "prefix_cache"),
    **_moved("engine", "requests", "chat_format gbnf grammar logprobs penalties processors text"),
}
"""Modules that other packages are likely to import, by their former names."""


class FormerModules(MetaPathFinder, Loader):
    """Finds modules by their former names, with a warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in FORMER_MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        present = FORMER_MODULES[spec.name]
        text = f"{spec.name} is {present} now; the next release takes no other name"
        warnings.warn(text, FutureWarning, stacklevel=2)
        module = import_module(present)
        # The import that follows would let the module believe that it has the former name.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        module.__spec__ = spec.loader_state if spec else None


def take_former_modules() -> None:
    """Let imports of this process find modules by their former names."""
    # First: the folder of a package that was renamed has modules of the same names.
    sys.meta_path.insert(0, FormerModules())
