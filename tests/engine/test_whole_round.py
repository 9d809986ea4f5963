"""Rounds that run as one: the texts, and the draws, of rounds that run stage by stage."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch

import monge
from monge.control.cost_model import CostModel
from monge.core.draws import TapeDraws
from monge.core.law import DenseLaw
from monge.draft.model import ModelDrafter
from monge.engine import backends
from monge.engine.batch import decode
from monge.engine.compiled_round import CompiledRound
from monge.engine.logprobs import LogprobOptions
from monge.engine.round_module import Round
from monge.engine.step_check import step_spec
from monge.engine.step_module import Step
from monge.verify.traversal import Traversal
from tests.engine.rounds import RULES, both, modules, num_whole, uncompiled, with_programs, written
from tests.engine.tiny import network, perturbed, prompts


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize(
    ("name", "attention", "depth"),
    [
        ("llama", "sdpa", 1),
        ("llama", "sdpa", 3),
        ("llama", "eager", 3),
        ("gpt2", "sdpa", 3),
        ("opt", "eager", 2),
        ("deepseek_v3", "sdpa", 3),
    ],
)
def test_texts_and_records(name, attention, depth, rules):
    plain, whole, programs = both(name, attention, tree=f"chain({depth})")
    for seed in range(3):
        assert written(whole, seed=seed, **rules) == written(plain, seed=seed, **rules)
    assert programs[rules["temperature"] == 0].count > 10
    assert programs[rules["temperature"] != 0].count == 0


def test_both_ways_of_running_take_turns():
    """As many draws are used, whoever runs the round."""
    plain, whole, programs = both()
    run, turns = whole.parts.whole_round.run, iter(range(10**6))
    whole.parts.whole_round.run = lambda *asked: run(*asked) if next(turns) % 2 else None
    assert written(whole, temperature=1.0, max_new_tokens=60) == written(plain, temperature=1.0, max_new_tokens=60)
    assert 5 < num_whole(programs) < next(turns) - 5


def test_the_tree_has_the_laws_that_its_tokens_were_drawn_from():
    plain, whole, _ = both()
    trees, observe = [], ModelDrafter.observe
    for decoder in (plain, whole):
        seen = []
        options = {"max_new_tokens": 24, "temperature": 0.7, "seed": 3, "ignore_eos": True}
        (session,) = decoder.sessions([prompts((9,), seed=5)[0]], **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelDrafter, "observe", lambda self, *told, to=seen: to.extend(told[1]) or observe(self, *told))
            for _ in decode([session], decoder.parts, max_batch_size=1):
                pass
        trees.append([draft.tree for draft in seen])
    assert len(trees[0]) > 4
    for one, other in zip(*trees, strict=True):
        assert (one.token_ids, one.parents, one.offers) == (other.token_ids, other.parents, other.offers)
        for ours, theirs in zip(one.proposals, other.proposals, strict=True):
            assert type(ours) is type(theirs)
            if isinstance(getattr(ours, "law", None), DenseLaw):
                torch.testing.assert_close(ours.law.probs, theirs.law.probs, atol=1e-6, rtol=0)


class TestStageByStage:
    """What a whole round does not say, or another verifier decides, is left to the stages."""

    @pytest.mark.parametrize(
        "options",
        [
            {"top_k": 5, "temperature": 1.0},
            {"processors": (lambda _, scores: scores * 1.5,), "temperature": 1.0},
            {"max_new_tokens": 3, "temperature": 1.0},
        ],
        ids=["truncated", "processors", "short"],
    )
    def test_requests(self, options):
        plain, whole, programs = both()
        assert written(whole, **options) == written(plain, **options)
        assert num_whole(programs) == 0

    def test_several_requests(self):
        plain, whole, programs = both()
        assert written(whole, 2, temperature=1.0) == written(plain, 2, temperature=1.0)
        assert num_whole(programs) <= 8, "only those of the request that is left at the end"

    def test_logprobs(self):
        plain, whole, programs = both()
        texts = []
        for decoder in (plain, whole):
            (request,) = decoder.requests([prompts((9,), seed=5)[0]], max_new_tokens=12, seed=1)
            session = decoder.session(replace(request, logprobs=LogprobOptions(num_top=2)))
            for _ in decode([session], decoder.parts, max_batch_size=1):
                assert len(session.logprobs) == len(session.records[-1].token_ids)
            texts.append(session.completion_ids)
        assert texts[0] == texts[1]
        assert num_whole(programs) == 0

    def test_draws_that_cannot_be_looked_at_first(self):
        class Blind:
            def __init__(self):
                self.tape = TapeDraws([(0.618 * place) % 1 for place in range(500)])

            def uniform(self):
                return self.tape.uniform()

            def bernoulli(self, prob):
                return self.tape.bernoulli(prob)

            def categorical(self, law):
                return self.tape.categorical(law)

        plain, whole, programs = both()
        texts = []
        for decoder in (plain, whole):
            (request,) = decoder.requests([prompts((9,), seed=5)[0]], max_new_tokens=12, temperature=1.0)
            session = decoder.session(replace(request, draws=Blind()))
            for _ in decode([session], decoder.parts, max_batch_size=1):
                pass
            texts.append(session.completion_ids)
        assert texts[0] == texts[1]
        assert num_whole(programs) == 0

    def test_windows_that_a_controller_shortens(self):
        plain, whole, programs = both(controller="fixed(max_depth=2)", tree="chain(3)")
        assert written(whole, temperature=1.0) == written(plain, temperature=1.0)
        assert num_whole(programs) == 0

    def test_sliding_windows(self):
        plain, whole, programs = both("mistral_window")
        assert written(whole, temperature=1.0) == written(plain, temperature=1.0)
        assert num_whole(programs) == 0

    def test_targets_whose_states_are_watched(self):
        plain, whole, programs = both()
        whole.parts.target.watch((1,))
        assert written(whole, temperature=1.0) == written(plain, temperature=1.0)
        assert num_whole(programs) == 0

    def test_parts_that_are_exchanged(self):
        _, whole, _ = both()
        parts = whole.parts
        assert replace(parts).whole_round is parts.whole_round
        assert replace(parts, rule=Traversal()).whole_round is None
        assert replace(parts, drafter=replace(parts.drafter, top_k=3)).whole_round is None
        assert replace(parts, target=parts.drafter.own_chain.model).whole_round is None


class Uncompiled(backends.Eager):
    """Runs rounds as one without compiling them."""

    def round_programs(self, target, draft, depth, decision):
        networks = draft.network, target.network
        specs = tuple(map(step_spec, networks))
        steps = tuple(map(Step, networks, specs))
        return {one: uncompiled(Round(*steps, specs, depth, decision, is_greedy=one)) for one in (True, False)}


class TestControllers:
    def loaded(self, controller, **settings):
        target = network("llama", "sdpa")
        draft = perturbed(target, 0.05)
        return monge.load(target, draft, controller=controller, backend=Uncompiled(), **settings)

    def test_costs_are_measured(self):
        decoder = self.loaded("price")
        costs, whole = decoder.parts.memory.costs, decoder.parts.whole_round
        assert whole.depth == costs.whole.depth == 3, "of a chain of eight, the usual window"
        assert 1.0 < costs.whole.plain_rounds < 20.0
        assert costs.whole.longest_text == whole.longest_text == CompiledRound.longest_text
        assert self.loaded("price", costs=CostModel.from_dict(costs.as_dict())).parts.memory.costs.whole == costs.whole

    def test_nothing_is_measured_where_costs_are_given(self):
        costs = CostModel.linear(plain=1.0, node=0.1, draft=0.3)
        assert self.loaded("price", costs=costs).parts.memory.costs.whole is None

    def test_costs_that_were_kept_by_parts_with_such_rounds(self):
        costs = CostModel.linear(plain=1.0, node=0.1, draft=0.3)
        costs.note_whole(3, 0.5)
        assert self.loaded("price", costs=costs).parts.memory.costs.whole is not None
        assert costs.whole.longest_text == CompiledRound.longest_text, "that of the program, not of the one before"
        target = network("llama", "sdpa")
        assert monge.load(target, perturbed(target), controller="price", costs=costs).parts.memory.costs.whole is None

    @pytest.mark.parametrize("controller", ["price", "on_the_fly", "fsm"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_take_turns(self, controller, temperature):
        costs = CostModel.linear(plain=1.0, node=0.1, draft=0.3, learns=False)
        costs.note_whole(3, 0.9)
        reads = controller in {"price", "on_the_fly"}
        decoder = self.loaded(controller, tree="chain(8)", **({"costs": costs} if reads else {}))
        (result,) = decoder.generate([prompts((9,), seed=5)[0]], max_new_tokens=80, temperature=temperature, seed=1)
        as_one = [record for record in result.records if record.as_one]
        assert as_one
        assert {(record.depth, record.plan.max_depth, record.plan.stop) for record in as_one} == {(3, 3, None)}
        assert all(record.times.draft_s == 0.0 for record in as_one)
        if controller == "price":
            assert len(as_one) < len(result.records), "it asks for the network's confidence now and then"
        if temperature == 0:
            none = monge.load(network("llama", "sdpa"), drafter="none")
            assert result.token_ids == none.generate([prompts((9,), seed=5)[0]], max_new_tokens=80)[0].token_ids

    def test_rounds_teach_what_they_cost(self):
        costs = CostModel.linear(plain=1.0, node=0.1, draft=0.3, learns=True)
        costs.note_whole(3, 1e-3)
        decoder = self.loaded("on_the_fly", tree="chain(8)", costs=costs)
        decoder.generate([prompts((9,), seed=5)[0]], max_new_tokens=80, temperature=1.0, seed=1)
        assert costs.whole.plain_rounds != 1e-3


class TestTrouble:
    @pytest.mark.parametrize("rules", RULES, ids=str)
    def test_logits_that_make_no_law_are_looked_at_by_the_stages(self, rules):
        plain, whole, programs = both()
        for program in programs.values():
            inner = program.program

            def doubtful(inputs, inner=inner, program=program):
                numbers, laws = inner(inputs)
                return [*numbers[:-1], program.count % 2], laws

            program.program = doubtful
        assert written(whole, max_new_tokens=60, **rules) == written(plain, max_new_tokens=60, **rules)
        assert num_whole(programs) > 10

    @pytest.mark.parametrize("spoilt", ["draft", "target"])
    @pytest.mark.parametrize("rules", RULES, ids=str)
    def test_such_logits_are_noticed(self, rules, spoilt):
        target = copy.deepcopy(network("llama", "sdpa"))
        draft = copy.deepcopy(perturbed(target))
        plain = monge.load(target, draft, controller="fixed")
        (prompt,) = prompts((9,), seed=5)
        network_ = {"draft": draft, "target": target}[spoilt]
        network_.lm_head.weight.data[7] = float("nan")
        whole = with_programs(plain, {greedy: uncompiled(module) for greedy, module in modules(plain.parts).items()})
        outcomes = []
        for decoder in (plain, whole):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                (session,) = decoder.sessions([prompt], max_new_tokens=4 + 2, seed=1, **rules)
                for _ in decode([session], decoder.parts, max_batch_size=1):
                    pass
            outcomes.append((session.completion_ids, type(session.error), [str(one.message) for one in caught]))
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][1 if spoilt == "target" else 2]

    def test_a_program_that_fails_is_not_asked_again(self):
        plain, whole, programs = both()
        for program in programs.values():
            inner = program.program

            def failing(inputs, inner=inner, program=program):
                if program.count == 3:
                    raise RuntimeError("out of memory")
                return inner(inputs)

            program.program = failing
        with pytest.warns(
            UserWarning, match="rounds run stage by stage from here on, .* RuntimeError: out of memory"
        ) as caught:
            text = written(whole, temperature=1.0, max_new_tokens=60)
        assert text == written(plain, temperature=1.0, max_new_tokens=60)
        assert len(caught) == 1
        assert num_whole(programs) == 3
