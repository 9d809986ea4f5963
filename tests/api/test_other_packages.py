"""Another package adds a verifier, a drafter, a tree and a controller by entry points, without a change of the library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = '''
"""One part of each kind, written as another package would write them."""

from dataclasses import dataclass

from monge.control.base import SoloController
from monge.core.context import DraftPlan
from monge.laws.law import residual
from monge.laws.proposal import Deterministic, Iid
from monge.laws.tree import fixed_chain
from monge.draft.base import Capabilities, Draft, Drafter
from monge.draft.tree.base import TreeBuilder, TreeLimits
from monge.verify.base import NodeRule


@dataclass(frozen=True, slots=True)
class RatioRule(NodeRule):
    """Accept one draw with probability min(1, p/q)."""

    accepts = frozenset({Iid})
    max_width = 1

    def emit(self, target_law, proposal, candidates, draws):
        (x,) = candidates
        q = proposal.law
        if draws.bernoulli(min(1.0, target_law.prob(x) / q.prob(x))):
            return x
        return draws.categorical(residual(target_law, q))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatDrafter(Drafter[None]):
    """Propose the last token again."""

    count: int = 2

    @property
    def capabilities(self):
        return Capabilities(
            proposes=frozenset({Deterministic}),
            max_width=1,
            max_depth=self.count,
            needs_trees=False,
            runs_network=False,
        )

    def open(self, contexts):
        return [None] * len(contexts)

    def draft(self, contexts, states, plans, draws):
        found = []
        for context, plan, own in zip(contexts, plans, draws, strict=True):
            last = context.token_ids[-1]
            found.append(Draft(fixed_chain(last, (last,) * plan.depth(self.count)), None))
        return found

    def observe(self, contexts, drafts, verdicts):
        return [None] * len(contexts)

    def close(self, context):
        return None


@dataclass(frozen=True, slots=True)
class PairTree(TreeBuilder):
    """A chain of at most two draws."""

    depth: int = 2

    @property
    def limits(self):
        return TreeLimits(proposes=frozenset({Iid}), max_width=1, max_depth=self.depth, max_nodes=self.depth)

    def expand(self, tree, frontier, laws, plan, draws):
        children = tree.grow(frontier[0], Iid(laws[0], 1), draws)
        return children if tree.num_nodes <= plan.nodes(plan.depth(self.depth)) - 1 else ()

    def finish(self, tree, plan):
        return tree.finish()


@dataclass(frozen=True, slots=True)
class Alternate(SoloController[int]):
    """Draft in every second round."""

    depth: int = 2

    def init(self, shared):
        return 0

    def plan_one(self, state, info, context_length, draws):
        return DraftPlan(max_depth=self.depth if state % 2 else 0)

    def update(self, state, record):
        return state + 1
'''

ENTRY_POINTS = """
[monge.verifiers]
ratio_rule = other_parts:RatioRule
broken_rule = other_parts:Missing

[monge.drafters]
repeat = other_parts:RepeatDrafter

[monge.trees]
pair = other_parts:PairTree

[monge.controllers]
alternate = other_parts:Alternate
fixed = other_parts:Alternate
"""

BROKEN = "'broken_rule' cannot be loaded from other_parts:Missing: AttributeError"
ERROR = f"verifier {BROKEN}: module 'other_parts' has no attribute 'Missing'"

ROOMS = {
    "verifiers": "ratio_rule",
    "drafters": "repeat",
    "trees": "pair",
    "controllers": "alternate",
}

DECODE = """
import json, warnings

warnings.simplefilter("ignore")
from monge.api import make_components
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel

VOCAB = 3
CASE = Case(horizon=2, max_new_tokens=3)


def model(seed):
    return TabularModel(RandomTable(VOCAB, seed), VOCAB)


def error(*drafts, **options):
    law = output_law(lambda: make_components(model(1), *map(model, drafts), **options), CASE)
    return law_error(law, target_law(model(1), CASE))


print(
    json.dumps(
        {
            "verifier": error(2, tree="chain(2)", verifier="ratio_rule"),
            "drafter": error(drafter="repeat(count=2)"),
            "tree": error(2, tree="pair(depth=2)"),
            "controller": error(2, tree="chain(2)", controller="alternate(depth=1)"),
            "all": error(2, tree="pair", verifier="ratio_rule", controller="alternate"),
        }
    )
)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run Python with the other package installed."""
    folder = tmp_path_factory.mktemp("site")
    about = folder / "other_parts-0.1.dist-info"
    about.mkdir()
    files = {
        folder / "other_parts.py": PARTS,
        about / "METADATA": "Metadata-Version: 2.1\nName: other-parts\nVersion: 0.1\n",
        about / "entry_points.txt": ENTRY_POINTS,
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, source)))}
    settings = {"env": environment, "capture_output": True, "text": True, "timeout": 120}

    def call(*arguments):
        return subprocess.run([sys.executable, *arguments], **settings, check=True)

    return call


def test_each_part_decodes_with_the_law_of_the_target(run):
    errors = json.loads(run("-c", DECODE).stdout)
    assert errors.keys() == {"verifier", "drafter", "tree", "controller", "all"}
    assert max(errors.values()) < 1e-12, errors


def test_the_parts_are_listed(run):
    listed = run("-m", "monge", "list", "--json")
    rooms = json.loads(listed.stdout)
    found = {room: {part["name"]: part for part in rooms[room]} for room in ROOMS}
    assert all(name in found[room] for room, name in ROOMS.items())
    assert found["drafters"]["repeat"]["settings"] == {"count": 2}
    assert found["trees"]["pair"]["summary"] == "A chain of at most two draws."
    assert "broken_rule" not in listed.stdout
    assert "max_depth" in found["controllers"]["fixed"]["settings"], "that of the library"
    for warning in (
        BROKEN,
        "controller 'fixed' of other_parts:Alternate is ignored: the name is taken",
    ):
        assert listed.stderr.count(warning) == 1


def test_a_broken_part_is_heard_of_where_it_is_asked_for(run):
    assert run("-m", "monge", "list", "verifiers").stderr.count(BROKEN) == 1
    assert "broken_rule" not in run("-m", "monge", "list", "drafters").stderr
    code = "import monge; monge.load({}).generate('Once', max_new_tokens=2)"
    assert "cannot be loaded" not in run("-c", code.format("verifier='ratio_rule'")).stderr
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run("-m", "monge", "generate", "Once", "--verifier", "broken_rule")
    assert failed.value.returncode == 2
    assert failed.value.stderr.splitlines() == [f"error: {ERROR}"]
