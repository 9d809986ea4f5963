"""One setting at a time: the base is compared with itself, and every arm is a controller that exists."""

from dataclasses import replace

import pytest

from monge.bench.ablations import ablate, num_replays, studies
from monge.bench.control_simulation import ABLATIONS, WORLDS, compare_controllers
from monge.control.latency import Latency
from monge.control.registry import CONTROLLERS
from monge.core.draws import SeededDraws
from monge.core.errors import OptionError
from monge.core.prompt import PromptProfile
from monge.replay.compare import Settings
from tests.replay.toys import PROMPT, logged, models

COSTS = Latency.linear(plain=1.0, node=0.05, draft=0.2).as_dict()


def test_arms_differ_from_the_base_in_one_setting() -> None:
    for study in studies():
        controllers = [study.base.controller, *study.variants.values()]
        made = [CONTROLLERS.parse(str(text)) for text in controllers]
        assert len(set(map(repr, made))) == len(made)
        assert len({type(one) for one in made}) == 1


def test_every_arm_is_compared_with_its_base() -> None:
    target, draft = models(3)
    log = logged(target, (0, 1, 1, 2, 0, 2) * 2)
    told = replace(log.texts[0], profile=PromptProfile(token_ids=PROMPT, text="ab", surprisal=1.0, entropy=1.0))
    log, seen, settings = (
        replace(log, costs=dict.fromkeys(("model", "ngram", "none"), COSTS), texts=(told,)),
        [],
        Settings(repeats=1),
    )
    rows = ablate(log, draft, settings, on_text=lambda: seen.append(1))
    assert len(seen) == num_replays(log, settings) == len(rows)
    assert [row["speed"] for row in rows if row["arm"] == "base"] == [{"mean": 1.0, "low": 1.0, "high": 1.0}] * len(studies())
    assert {row["speed"]["mean"] for row in rows} != {1.0}


def test_speeds_need_times() -> None:
    target, draft = models(3)
    with pytest.raises(OptionError, match="without --no-costs"):
        ablate(logged(target, (0, 1)), draft)


@pytest.mark.slow
def test_simulated_ablations() -> None:
    rows = compare_controllers(60, SeededDraws, ABLATIONS, clock=lambda: 0.0)
    assert len(rows) == len(WORLDS) * (len(ABLATIONS) + 1)
    assert all(row["speed"] > 0.0 for row in rows)
