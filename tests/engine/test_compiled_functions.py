"""Verdicts as few kernels: those of the program, compiled once for all sampling rules, refused where they differ."""

import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

import monge
from monge.backends import compiled_functions
from monge.backends import cuda as cuda_graph
from monge.backends.compiled_functions import FunctionCompiler, compile_function
from monge.backends.cuda import FunctionGraphs
from monge.core.draws import SeededDraws
from monge.core.proposal import Iid, WithoutReplacement
from monge.core.sampling_rules import SamplingRules, launched
from monge.verify.base import as_verifier
from monge.verify.functional import num_uniforms
from monge.verify.problem import ScoredTree
from monge.verify.registry import VERIFIERS
from tests.engine import pretend
from tests.engine.test_cuda_graph import Sums, placed, written
from tests.engine.tiny import network, perturbed
from tests.verify.tensor_problems import BUSH, CHAIN, REGIMES, problem
from tests.verify.test_programs import Laws

BATCH = 8
ROOT = Path(__file__).parents[2]


class OnCpu(Laws):
    """Laws that programs read, although nothing waits here."""

    is_stacked = True


class Operations(TorchDispatchMode):
    """Counts what a device would launch."""

    views = {"view", "expand", "unsqueeze", "squeeze", "select", "slice", "unbind", "t", "alias"}

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in self.views
        return func(*args, **(kwargs or {}))


@pytest.fixture
def said(caplog):
    with caplog.at_level(logging.INFO, logger="monge"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def ones():
    """Makes tensors on a device."""
    with pretend.device() as device:
        yield lambda *shape: torch.ones(*shape).to(device)


class Scaled(Sums):
    """The scale is an input."""

    def prepare(self, scale, one, other):
        return scale * one, other


class Form:
    """A function in another form."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *inputs):
        return self.function(*inputs)


def alone(compile, many_calls):
    """A compiler that needs no other process."""
    return FunctionCompiler(compile, many_calls, is_elsewhere=False)


@pytest.mark.parametrize(
    ("rule", "kind", "parents"),
    [
        ("block", Iid, CHAIN),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("target_walk", Iid, BUSH),
                ("rrs", Iid, BUSH),
                ("rrs_without_replacement", WithoutReplacement, BUSH),
                ("traversal", WithoutReplacement, BUSH),
                ("optimal", Iid, BUSH),
                ("layer", Iid, BUSH),
            )
        ),
    ],
)
def test_compiled_verdicts_are_those_of_the_program(rule, kind, parents, said, monkeypatch):
    """Of laws with zeros, ties, one token, tiny masses, and of logits that are no numbers."""
    verifier, rng = as_verifier(VERIFIERS.parse(rule)), np.random.default_rng(3)
    monkeypatch.setattr(cuda_graph, "_MOST_NUMBERS", 0)  # none is captured
    graphs = FunctionGraphs(pretend.Rerun(), 0, alone(compile_function, 0))
    metrics.reset()
    first = Operations()
    for seed in range(60):
        regimes = REGIMES[seed % len(REGIMES)], REGIMES[seed // len(REGIMES) % len(REGIMES)]
        one = problem(regimes, parents, kind, seed)
        logits = one.p.log()
        if seed == 59:
            logits[0, 0] = torch.nan
        rules = SamplingRules(temperature=float(rng.choice([1.0, 0.7])))
        seeds = rng.integers(2**31, size=BATCH).tolist()

        def verdicts(record):
            laws = OnCpu(logits, record, rules)  # noqa: B023
            scored = [
                ScoredTree(tree=one.tree, target_laws=laws, draws=SeededDraws(seed))  # noqa: B023
                for seed in seeds  # noqa: B023
            ]
            return verifier.by_programs(scored)

        if not seed:
            verdicts(launched)
            with first:
                verdicts(launched)
        expected = verdicts(launched)
        assert verdicts(graphs) == expected
        assert len(expected) == (0 if seed == 59 else BATCH)
    assert said() == [], "compiled, and not given up"
    assert 0 < 2 * metrics.generated_kernel_count < first.count, "one program for both temperatures"
    assert num_uniforms(one.children) > 0


class TestWhenFunctionsAreCompiled:
    def test_once_for_all_that_decide_alike(self, ones):
        compiled, capture = [], pretend.Rerun()

        def compile(function, inputs):
            compiled.append([tuple(tensor.shape) for tensor in inputs])
            return Form(function)

        graphs = FunctionGraphs(capture, 1, alone(compile, 4))
        for call in range(1, 7):
            for scale in (2, 5):
                assert graphs(Sums(scale), (ones(2, 3), ones(2, 3))).tolist() == [3 + 3 * scale] * 2
            assert compiled == ([] if call <= 3 else [[(2, 3), (2, 3)]])
            # Captured when it comes again, and anew when it is compiled.
            assert capture.num_captured == {1: 0, 2: 2, 3: 2}.get(call, 4)
        for _ in range(2):
            scaled = graphs(Scaled(), (3 * ones(1), ones(2, 3), ones(2, 3)))
            assert scaled.tolist() == [12] * 2
        (known,) = [known for known in graphs._functions.values() if known.num_calls == 2]
        assert isinstance(known.form, Form), "known already"
        for _ in range(7):
            graphs(Sums(), (ones(1, 3), ones(1, 3)))
        assert compiled[1:] == [[(1, 3), (1, 3)]], "for other shapes anew"

    def test_nothing_is_kept_of_shapes_that_come_once(self, ones):
        """Such as trees whose shape depends on the text. Their laws are made once."""
        prepared, compiler = [], alone(lambda function, _: Form(function), 0)

        class Counted(Sums):
            def prepare(self, one, other):
                prepared.append(one)
                return super().prepare(one, other)

        graphs = FunctionGraphs(pretend.Rerun(), 1, compiler)
        for size in range(1, 9):
            assert graphs(Counted(), (ones(1, size), ones(1, size))).tolist() == [2 * size]
        assert (len(prepared), compiler._keys) == (8, {})

    def test_of_many_numbers_too(self, monkeypatch, ones):
        monkeypatch.setattr(cuda_graph, "_MOST_NUMBERS", 11)
        capture, compiled = pretend.Rerun(), []
        compiler = alone(lambda function, _: compiled.append(Form(function)) or compiled[-1], 2)
        graphs = FunctionGraphs(capture, 1, compiler)
        assert [graphs(Sums(), (ones(2, 3), ones(2, 3))).tolist() for _ in range(4)] == [[6, 6]] * 4
        assert (len(compiled), capture.num_captured) == (1, 0)

    @pytest.mark.parametrize(
        ("compile", "reason"),
        [
            (
                lambda trace, inputs: lambda one, other: trace(one, other) + (one > 1).any(1),
                "others",
            ),
            (lambda trace, inputs: 1 / 0, "ZeroDivisionError: division by zero"),
        ],
    )
    def test_what_differs_or_fails_is_not_used(self, compile, reason, said, ones):
        capture = pretend.Rerun()
        graphs = FunctionGraphs(capture, 1, alone(compile, 2))
        for number in range(5):
            one = number * ones(2, 3)
            assert graphs(Sums(), (one, ones(2, 3))).tolist() == [3 * number + 3] * 2
        (told,) = said()
        assert told.startswith("verdicts are not compiled: ")
        assert reason in told
        assert capture.num_captured == 1


class TestInAnotherProcess:
    """It compiles first, so that this one finds the program in the compiler's cache."""

    def run(self, monkeypatch, ones, has_failed):
        started = []

        class Process:
            is_done, has_failed = False, False

            def __init__(self, work, arguments):
                assert work is compiled_functions.compile_zeros
                started.append((arguments, self))

            def is_busy(self, seconds):
                self.has_failed = self.is_done and has_failed
                return not self.is_done

        monkeypatch.setattr(compiled_functions, "BackgroundCompiler", Process)
        compiled = []

        def made(function, inputs):
            compiled.append(inputs)
            return Form(function)

        graphs = FunctionGraphs(pretend.Rerun(), 0, FunctionCompiler(made, 1))

        def call(rows, count=1):
            for _ in range(count):
                assert graphs(Sums(), (ones(rows, 3), ones(rows, 3))).tolist() == [6] * rows

        call(1, 5)
        call(2, 5)
        ((arguments, process),) = started
        assert arguments["shapes"] == [((1, 3), torch.float32)] * 2
        assert (arguments["device"], compiled) == (pretend.NAME, [])
        process.is_done = True
        call(1)
        call(2)
        return started, compiled, call

    def test_one_at_a_time(self, monkeypatch, ones):
        started, compiled, call = self.run(monkeypatch, ones, has_failed=False)
        assert (len(started), len(compiled)) == (2, 1)
        started[1][1].is_done = True
        call(2, 3)
        call(1, 3)
        assert (len(started), len(compiled)) == (2, 2)

    def test_none_after_one_that_failed(self, monkeypatch, ones):
        started, compiled, call = self.run(monkeypatch, ones, has_failed=True)
        call(3, 5)
        assert (len(started), len(compiled)) == (1, 0)

    def test_not_without_room(self, monkeypatch, ones):
        """Functions stay as they are, and it is asked again after as many calls."""
        asked, started = [], []
        monkeypatch.setattr(compiled_functions, "_has_room", asked.append)
        monkeypatch.setattr(
            compiled_functions, "BackgroundCompiler", lambda *given: started.append(given)
        )
        graphs = FunctionGraphs(pretend.Rerun(), 1, FunctionCompiler(many_calls=3))
        for _ in range(9):
            assert graphs(Sums(), (ones(1, 3), ones(1, 3))).tolist() == [6]
        assert (len(asked), started) == (2, [])

    @pytest.mark.slow
    def test_really(self, tmp_path):
        """In a fresh process, as other tests leave settings behind that are a part of the compiler's keys."""
        code = f"from {__name__} import take_over; take_over()"
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def take_over():
    """Use what another process has compiled."""
    one = problem(("rough", "rough"), CHAIN, Iid, 1)
    cuda_graph._MOST_NUMBERS = 0  # none is captured
    graphs = FunctionGraphs(pretend.Rerun(), 0, FunctionCompiler(many_calls=2))
    verifier = as_verifier(VERIFIERS.parse("block"))

    def verdict(record):
        laws = OnCpu(one.p.log(), record)
        scored = ScoredTree(tree=one.tree, target_laws=laws, draws=SeededDraws(5))
        return verifier.by_programs([scored])

    expected = verdict(launched)
    for _ in range(3):
        assert verdict(graphs) == expected
    assert graphs._compiler is not None
    (process,) = graphs._compiler._processes.values()
    assert process._process is not None
    assert process._process.wait(300) == 0
    with torch.inference_mode():  # where it would have keys of its own
        assert verdict(graphs) == expected
    assert all(known.is_final for known in graphs._functions.values())
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert not counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.parametrize(
    "tree", ["chain(3)", pytest.param("fixed_width((2, 2))", marks=pytest.mark.slow)]
)
def test_texts_are_those_of_the_host(monkeypatch, tree, said):
    compiled = []
    own = alone(lambda function, _: compiled.append(Form(function)) or compiled[-1], 2)
    graphs = partial(FunctionGraphs, few_calls=0)
    monkeypatch.setattr(
        cuda_graph, "FunctionGraphs", lambda capture, compiler: graphs(capture, compiler=own)
    )
    rules = {"temperature": 0.8, "top_p": 0.9}
    target, draft = network("llama", "sdpa"), perturbed(network("llama", "sdpa"))
    settings = {"tree": tree, "controller": "fixed"}
    expected = written(monge.load(target, draft, **settings), rules)
    with pretend.device() as device:
        monkeypatch.setattr(cuda_graph, "GraphCapture", lambda _: pretend.Rerun())
        decoder = monge.load(
            placed(target, device), placed(draft, device), backend="compiled", **settings
        )
        for _ in range(3):
            assert written(decoder, rules) == expected
    assert compiled
    assert not any("not compiled" in text for text in said())
