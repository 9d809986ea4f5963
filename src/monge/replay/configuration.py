"""A choice of drafter, tree, verifier and controller, as a user writes it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from monge.api import make_components
from monge.core.model import SequenceModel
from monge.defaults import STEADY
from monge.draft.by_name import drafters_in, takes_target
from monge.engine.components import Components
from monge.options import LoadOptions, changed
from monge.replay.rules import with_replayable_rule

MODEL = "model"
HEADS = ("head", "shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration(LoadOptions):
    """Names with settings, as `monge.load` takes them; `None` is the default, or `fixed` of a controller."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that were chosen."""
        return changed(self)

    @property
    def label(self) -> str:
        """Return a label for tables and plots."""
        parts = (
            str(value) for name, value in self.settings.items() if not name.startswith("draft_")
        )
        return " ".join(parts) or "default"

    @property
    def load_arguments(self) -> dict[str, Any]:
        """Return arguments of `monge.load`: the settings, and the controller if something is drafted."""
        drafts = self.drafter != "none"
        return self.settings | ({"controller": self.controller or STEADY} if drafts else {})

    @property
    def takes_target(self) -> bool:
        """Return whether the drafter reads hidden states or layers of the target."""
        return self.drafter is not None and takes_target(self.drafter)

    def components(self, target: SequenceModel, draft: SequenceModel | None) -> Components:
        """Return the components; the draft model goes to drafters that run one.

        Where no verifier is named and a replay cannot follow the default one, another exact rule
        takes its place.

        Raises:
            MongeError: If they do not fit together.
        """
        needed_draft = draft if MODEL in self.drafter_names(draft) else None
        components = make_components(target, needed_draft, **self.settings)
        return components if self.verifier is not None else with_replayable_rule(components)

    def drafter_names(self, draft: SequenceModel | None) -> tuple[str, ...]:
        """Return the names of the drafters that it is made of, or of the default one.

        Raises:
            OptionError: If they cannot be read.
        """
        if self.drafter is None:
            return ("ngram",) if draft is None else (MODEL,)
        return tuple(text.partition("(")[0].strip() for text in drafters_in(self.drafter))


def grid(**choices: Sequence[Any] | None) -> Iterator[Configuration]:
    """Yield all combinations of choices by field, each once; an empty choice leaves the default."""
    names = list(choices)
    for values in product(*(dict.fromkeys(choices[name] or [None]) for name in names)):
        yield Configuration(**dict(zip(names, values, strict=True)))
