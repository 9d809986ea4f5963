"""What runs rounds as one: compiled programs, and recordings on a device that is not there."""

import copy

import pytest
import torch

import monge
from monge.engine import backends, compiled_round
from tests.engine import pretend
from tests.engine.compiling import require, shared_programs
from tests.engine.rounds import RULES, Counted, num_whole, with_programs, written
from tests.engine.test_compiled import no_compiling
from tests.engine.tiny import network, perturbed


def loaded(**settings):
    target = network("llama", "sdpa")
    return monge.load(
        target, perturbed(target), **{"tree": "chain(2)", "backend": "compiled", "controller": "fixed", **settings}
    )


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Loads the decoder whose programs are compiled once a run."""
    require("compiled")
    with shared_programs(tmp_path_factory, lambda _: loaded()) as locked:
        yield lambda: locked(None)


class TestCompiled:
    @pytest.mark.parametrize("rules", RULES, ids=str)
    def test_texts(self, programs, rules):
        decoder = programs()
        assert decoder.parts.whole_round is not None
        counted = {greedy: Counted(program) for greedy, program in decoder.parts.whole_round._programs.items()}
        for text in range(3):
            ours = with_programs(decoder, counted)
            assert written(ours, seed=text, **rules) == written(loaded(backend="eager"), seed=text, **rules)
        assert num_whole(counted) > 10

    def test_nothing_is_compiled_twice(self, programs, monkeypatch):
        programs()
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", no_compiling)
        assert loaded().parts.whole_round is not None

    def test_may_be_left_out(self, programs):
        programs()
        assert loaded(backend="compiled(rounds=False)").parts.whole_round is None

    @pytest.mark.parametrize("settings", [{"verifier": "traversal"}, {"draft_top_k": 4}, {"tree": "chain(9)"}], ids=str)
    def test_where_rounds_are_not_such(self, programs, monkeypatch, settings):
        programs()
        monkeypatch.setattr(compiled_round, "compile_rounds", no_compiling)
        assert loaded(**settings).parts.whole_round is None

    def test_large_networks_are_not_compiled_twice(self, programs, monkeypatch):
        programs()
        monkeypatch.setattr(compiled_round, "_LARGEST", 1000)
        assert loaded().parts.whole_round is None

    def test_a_program_with_other_laws_is_refused(self, programs, monkeypatch):
        programs()
        load = compiled_round.load_program

        def spoilt(*given):
            run = load(*given)
            return lambda inputs: [run(inputs)[0], *(one * 1.01 for one in run(inputs)[1:])]

        monkeypatch.setattr(compiled_round, "load_program", spoilt)
        with pytest.warns(UserWarning, match="rounds run stage by stage: rounds, compiled as one, come out otherwise"):
            assert loaded().parts.whole_round is None

    def test_a_program_that_cannot_be_made(self, programs, monkeypatch):
        programs()

        def refuse(*_):
            raise OSError("no space left on device")

        monkeypatch.setattr(compiled_round, "find_program", lambda *_: (None, "it is damaged"))
        monkeypatch.setattr(compiled_round, "build_program", refuse)
        with pytest.warns(UserWarning, match="stage by stage: rounds cannot be compiled as one: OSError: no space left"):
            assert loaded().parts.whole_round is None


class TestRecorded:
    @pytest.fixture
    def device(self, monkeypatch):
        monkeypatch.setattr(backends, "GraphRecorder", lambda _: pretend.Rerun())
        with pretend.device() as name:
            yield name

    @pytest.mark.parametrize(("name", "rules"), [*(("llama", rules) for rules in RULES), ("gpt2", RULES[1])], ids=str)
    def test_texts_and_one_wait_a_round(self, device, name, rules):
        target = network(name, "sdpa")
        draft = perturbed(target)
        placed = (copy.deepcopy(model).to(device) for model in (target, draft))
        decoder = monge.load(*placed, backend="compiled", controller="fixed")
        counted = {greedy: Counted(program) for greedy, program in decoder.parts.whole_round._programs.items()}
        ours = with_programs(decoder, counted)
        expected = written(monge.load(target, draft, controller="fixed"), max_new_tokens=24, **rules)
        run, waits = ours.parts.whole_round.run, []

        def watched(*asked):
            before = sum(pretend.waits.values())
            made = run(*asked)
            waits.append(sum(pretend.waits.values()) - before)
            return made

        ours.parts.whole_round.run = watched
        assert written(ours, max_new_tokens=24, **rules) == expected
        assert num_whole(counted) > 4
        assert set(waits) == {1}

    def test_what_moves_is_recorded_anew_and_nothing_else(self, device, monkeypatch):
        made = []
        monkeypatch.setattr(backends, "GraphRecorder", lambda _: made.append(pretend.Rerun()) or made[-1])
        target = network("llama", "sdpa")
        placed = [copy.deepcopy(model).to(device) for model in (target, perturbed(target))]
        decoder = monge.load(*placed, backend="compiled", controller="fixed")
        recorder = made[-1]  # of rounds; the networks' own were made before
        for _ in range(2):
            written(decoder, temperature=1.0, max_new_tokens=20)
        once = recorder.num_recorded
        written(decoder, temperature=1.0, max_new_tokens=20)
        assert 1 <= once <= 4, "one or two unread tokens, and perhaps a cache that has moved"
        assert recorder.num_recorded == once
