"""Steps captured as CUDA graphs: the same logits, each graph captured once, on a simulated device."""

import gc
import warnings
import weakref
from functools import partial

import pytest
import torch

import monge
from monge.backends import cuda as cuda_graph
from monge.backends.chain_graphs import ChainGraph
from monge.backends.cuda import (
    FunctionGraphs,
    GraphCapture,
    capture_forward,
)
from monge.backends.module_graphs import ModuleGraph, capture_module
from monge.backends.prompt_graphs import PromptGraphs
from monge.core.errors import BackendError
from monge.core.sampling_rules import SamplingRules
from monge.heads.readers.registry import load_head
from monge.laws.levels import LevelDraws, LevelShape
from monge.laws.proposal import Iid
from monge.networks.base import NodeBlock
from monge.networks.hf_tree import HfTreeModel
from monge.networks.network_facts import OutputLayer
from monge.networks.tree_cache import CAPTURED_ROOM, TreeCache
from tests.engine import pretend
from tests.engine.compiling import captured_forward, read_by
from tests.engine.pretend import placed
from tests.engine.tiny import network, perturbed, prompts
from tests.heads.readers.published import KINDS, steps_of
from tests.parity.comparing import RandomGrowth

TRUNCATED = {"temperature": 0.8, "top_p": 0.9}
LARGEST_DIFFERENCE = 5e-5
"""Allowed between float32 forwards in another order of summation; as for the eager backend."""


def captured_model(model, capture):
    return HfTreeModel(model, partial(capture_forward, capture=capture))


def both(target, device, capture):
    """The network without recordings, and with."""
    return HfTreeModel(target), captured_model(placed(target, device), capture)


def assert_equal_rounds(models, blocks, kept):
    """Both give the same logits for some blocks, of which a path is kept."""
    expected, got = (model.extend(blocks) for model in models)
    for row in blocks:
        torch.testing.assert_close(got[row].cpu(), expected[row], atol=LARGEST_DIFFERENCE, rtol=0)
    for model in models:
        model.commit(dict.fromkeys(blocks, kept))


@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mistral_window",
        "gemma3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "opt", "deepseek_v3")),
        "gpt2",
    ],
)
def test_captured_logits_are_those_of_the_network(device, name, attention):
    capture, own = pretend.Rerun(), placed(network(name, attention), device)
    step = captured_forward(own, capture)
    growth = RandomGrowth(
        own, prompts((9, 4, 6), seed=1), seed=2, reference=network(name, attention), step=step
    )
    before = capture.num_captured
    differences = [growth.round(compare=True) for _ in range(6)]
    assert growth.non_prefix_commits > 6, "the rounds were to move columns of the cache"
    assert max(differences) < LARGEST_DIFFERENCE, differences
    assert capture.num_captured > before


@pytest.mark.parametrize("num_nodes", [1, 3, 64, 65])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_captured_logits_at_every_batch_and_block_size(device, num_nodes, num_rows):
    capture = pretend.Rerun()
    models = both(network("llama", "sdpa"), device, capture)
    texts = dict(enumerate(prompts((300, 1, 20)[:num_rows], seed=3)))
    blocks = {row: NodeBlock.chain(prompts((num_nodes + row,), seed=row)[0]) for row in texts}
    for model in models:
        model.open(texts)
    before = capture.num_captured
    assert_equal_rounds(models, blocks, ())
    assert capture.num_captured == before + (num_nodes + num_rows - 1 <= 64)


def test_decoding_records_nothing_that_it_has(device, monkeypatch):
    """Every width once, then only where the cache has moved."""
    monkeypatch.setitem(CAPTURED_ROOM, "least", 64)
    capture = pretend.Rerun()
    models = both(network("llama", "sdpa"), device, capture)
    for model in models:
        model.open({0: (5, 6), 1: (7,)})
    counts, places = [capture.num_captured], [models[1]._cache.layout]
    for length in range(90):
        blocks = {row: NodeBlock.chain((5, 9, 4)[: 1 + length % 3]) for row in (0, 1)}
        assert_equal_rounds(models, blocks, (0,))
        counts.append(capture.num_captured)
        places.append(models[1]._cache.layout)
    moves = sum(after is not before for before, after in zip(places, places[1:], strict=False))
    assert 1 <= moves <= 2, "the cache was to move, and seldom"
    assert counts[-1] - counts[0] == 3 * (1 + moves)
    assert counts[3] == counts[40], "widths 1, 2 and 4 were all there"


def test_tensors_that_a_replay_reads_are_kept(device):
    """A replay reads the addresses of its recording: memory that nobody held would be somebody else's by then."""
    own, captures = placed(network("llama", "sdpa"), device), [pretend.Rerun()]
    step = captured_forward(own, lambda work: captures[-1](work))  # noqa: PLW0108 (the last one then)
    captures.append(lambda work: (lambda: None, work()))  # keeps nothing of the work
    module, read = step.module, []

    def watched(token_ids, places, masks, kept):
        read[:] = [weakref.ref(tensor) for tensor in (token_ids, *places, *masks, *kept)]
        return module(token_ids, places, masks, kept)

    step.module = watched
    model = read_by(step, own)
    model.open({0: (5, 6)})
    model.extend({0: NodeBlock.chain((7, 8, 9))})
    gc.collect()
    assert len(read) > 4
    assert all(one() is not None for one in read)


def test_few_graphs_are_kept(device, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 2)
    capture = pretend.Rerun()
    model = captured_model(placed(network("llama", "sdpa"), device), capture)
    model.open({0: (5, 6)})
    before = capture.num_captured

    def read(*counts):
        for count in counts:
            model.extend({0: NodeBlock.chain((7,) * count)})
            model.commit({0: ()})
        return capture.num_captured - before

    assert read(1, 2, 1, 4) == 3
    assert read(1) == 3, "the width that was met last was to stay"
    assert read(2) == 4


class NoRoom(pretend.Rerun):
    """Has room for some recordings."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def __call__(self, work):
        if self.num_captured == self.room:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")
        return super().__call__(work)


def test_without_room_other_sizes_run_as_they_are(device):
    target, capture = network("llama", "sdpa"), NoRoom(room=100)
    models = both(target, device, capture)
    capture.room = capture.num_captured + 1
    for model in models:
        model.open({0: (5, 6)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (1, 2, 4, 1):
            assert_equal_rounds(models, {0: NodeBlock.chain((7,) * count)}, (0,))
    (warning,) = (one for one in caught if "no memory" in str(one.message))
    text = "no memory for the CUDA graph of 1 requests by 2 nodes with 0 MiB of keys and values; 1 graphs are captured"
    assert str(warning.message).startswith(text)
    assert "tried to allocate 2 GiB" in str(warning.message)


class Sums:
    """A function of tensors with a constant."""

    def __init__(self):
        self.kept = torch.ones(3)

    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return 1

    def __call__(self, one, other):
        return one.sum(1) + other.sum(1)

    def constants(self, device):
        return self.kept


class TestFunctions:
    """Functions beside a network, such as verdicts."""

    def test_are_captured_when_they_come_again(self, device):
        capture, sums = pretend.Rerun(), Sums()
        graphs, kept = FunctionGraphs(capture, 2), weakref.ref(sums.kept)
        for number in range(6):
            one, other = (torch.full((2, 3), number + part).to(device) for part in (0, 5))
            assert graphs(sums, (one, other)).tolist() == [6 * number + 15] * 2
            assert capture.num_captured == (number > 1)
        assert graphs(sums, (one[:1], other[:1])).tolist() == [6 * number + 15]
        assert capture.num_captured == 1, "another shape"
        sums.kept = None
        gc.collect()
        assert kept() is not None, "a graph reads it"

    def test_of_many_numbers_run_as_they_are(self, device, monkeypatch):
        monkeypatch.setattr(cuda_graph, "_MOST_NUMBERS", 11)
        capture, one = pretend.Rerun(), torch.ones(2, 3).to(device)
        graphs = FunctionGraphs(capture, 2)
        assert [graphs(Sums(), (one, one)).tolist() for _ in range(4)] == [[6, 6]] * 4
        assert capture.num_captured == 0

    def test_without_room_run_as_they_are(self, device):
        sums, one = Sums(), torch.ones(2, 3).to(device)
        graphs = FunctionGraphs(NoRoom(0), 2)
        with pytest.warns(UserWarning, match="verification is launched") as told:
            assert [graphs(sums, (one, one)).tolist() for _ in range(6)] == [[6, 6]] * 6
        assert len(told) == 1

    def test_of_a_few_shapes_are_kept(self, device, monkeypatch):
        monkeypatch.setattr(cuda_graph, "_MAX_FUNCTIONS", 2)
        capture, sums = pretend.Rerun(), Sums()
        graphs = FunctionGraphs(capture, 2)
        for rows in (1, 2, 3, 1):
            for _ in range(4):
                one = torch.ones(rows, 3).to(device)
                assert graphs(sums, (one, one)).tolist() == [6] * rows
        assert capture.num_captured == 4


class TestPrompts:
    """Beginnings of texts, which are read beside the cache."""

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize(
        "name",
        [
            "llama",
            "mistral_window",
            *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "deepseek_v3")),
            "gpt2",
        ],
    )
    def test_give_the_logits_and_states_of_the_network(self, device, name, attention):
        capture, own = pretend.Rerun(), placed(network(name, attention), device)
        models = [HfTreeModel(network(name, attention))]
        models += [captured_model(own, capture)]
        logs = [model.watch((1,)) for model in models]
        models[1].prepare(4, 2)
        count = capture.num_captured
        texts = dict(enumerate(prompts((90, 33, 40, 1), seed=3)))
        more = dict(enumerate(prompts((7, 50, 3, 2), seed=4)))
        for model in models:
            model.open(texts)
            model.append({row: more[row] for row in (0, 2)})
        states = [[log.take(row).cpu() for row in texts] for log in logs]
        torch.testing.assert_close(*states, atol=LARGEST_DIFFERENCE, rtol=0)
        for _ in range(2):
            assert_equal_rounds(models, dict.fromkeys(texts, NodeBlock.chain((5, 9))), (0,))
        assert capture.num_captured == count, "all were captured before"

    def test_are_read_in_few_forwards(self, device, monkeypatch):
        models = both(network("llama", "sdpa"), device, pretend.Rerun())
        models[1].prepare(8, 2)
        replays, read = [], PromptGraphs.read

        def counted(self, token_ids, cache):
            replays.append(tuple(token_ids.shape))
            return read(self, token_ids, cache)

        monkeypatch.setattr(PromptGraphs, "read", counted)
        texts = dict(enumerate(prompts((120, 3, 28, 30, 32, 500, 1000), seed=3)))
        for model in models:
            model.open(texts)
        assert sorted(replays) == [(1, 120), (1, 500), (4, 32)], "1000 tokens are the network's"
        assert_equal_rounds(models, dict.fromkeys(texts, NodeBlock.chain((5, 9))), (0,))

    def test_stay_when_the_cache_moves(self, device, monkeypatch):
        monkeypatch.setitem(CAPTURED_ROOM, "least", 64)
        capture = pretend.Rerun()
        models = both(network("llama", "sdpa"), device, capture)
        models[1].prepare(1, 1)
        count = capture.num_captured
        for length in (60, 250, 40):
            for model in models:
                model.open({0: prompts((length,), seed=length)[0]})
            assert_equal_rounds(models, {0: NodeBlock.chain((5,))}, (0,))
            for model in models:
                model.close(0)
        assert capture.num_captured - count <= 2, "at most the one node of a round"


class TestPrepared:
    """Graphs that are captured before there is a text."""

    def test_more_requests_than_were_prepared(self, device, caplog):
        capture = pretend.Rerun()
        models = both(network("llama", "sdpa"), device, capture)
        models[1].prepare(2, 4)
        texts = dict(enumerate(prompts((5, 3, 8, 2, 6), seed=3)))
        for model in models:
            model.open(texts)
        count = capture.num_captured
        with caplog.at_level("INFO", logger="monge"):
            for _ in range(3):
                assert_equal_rounds(models, {row: NodeBlock.chain((5, 9)) for row in texts}, (0,))
            assert capture.num_captured == count, "a few rounds are not worth it"
            for _ in range(2):
                assert_equal_rounds(models, {row: NodeBlock.chain((5, 9)) for row in texts}, (0,))
        assert capture.num_captured == count + 1, "a batch of five is captured once"
        (told,) = (one.message for one in caplog.records if "prepared for fewer" in one.message)
        assert told.startswith("8 requests by 2 nodes: this decoder was prepared for fewer")

    def test_so_many_requests_that_launches_do_not_count(self, device, monkeypatch):
        monkeypatch.setattr(cuda_graph, "_MOST_NODES", 7)
        capture = pretend.Rerun()
        models = both(network("llama", "sdpa"), device, capture)
        count, texts = capture.num_captured, dict(enumerate(prompts((5, 3, 8), seed=3)))
        for model in models:
            model.open(texts)
        assert_equal_rounds(models, {row: NodeBlock.chain((5, 9)) for row in texts}, (0,))
        assert capture.num_captured == count

    def test_without_room_for_all_graphs(self, device):
        models = both(network("llama", "sdpa"), device, NoRoom(8))
        with pytest.warns(UserWarning, match="no memory for the CUDA graph") as told:
            models[1].prepare(4, 8)
        assert len(told) == 1
        texts = dict(enumerate(prompts((5, 3, 8), seed=3)))
        for model in models:
            model.open(texts)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for size in (1, 3, 6):
                tokens = prompts((size,), seed=size)[0]
                assert_equal_rounds(models, dict.fromkeys(texts, NodeBlock.chain(tokens)), (0,))

    def test_without_room_for_keys_and_values(self, device, monkeypatch):
        capture = pretend.Rerun()
        models = both(network("llama", "sdpa"), device, capture)

        def full(self, rows):
            raise torch.OutOfMemoryError("full")

        count = capture.num_captured
        monkeypatch.setattr(TreeCache, "reserve", full)
        with pytest.warns(UserWarning, match="no memory for keys and values of 4 requests"):
            models[1].prepare(4, 8)
        assert capture.num_captured == count
        for model in models:
            model.open({0: (5, 6)})
        assert_equal_rounds(models, {0: NodeBlock.chain((5, 9))}, (0,))


def test_logits_of_a_step_survive_the_next_replay(device):
    """The next repetition writes its own to the same place."""
    model = captured_model(placed(network("llama", "sdpa"), device), pretend.Rerun())
    model.open({0: (5, 6)})
    first = model.extend({0: NodeBlock.chain((7, 8))})[0]
    before = first.cpu().clone()
    model.extend({0: NodeBlock.chain((9, 4), after=1)})
    assert torch.equal(first.cpu(), before)


def test_captured_hidden_states_are_those_of_the_network(device):
    target = network("llama", "sdpa")
    own, capture = placed(target, device), pretend.Rerun()
    ours = captured_model(own, capture)
    states = []
    for model in (HfTreeModel(target), ours):
        watched = model.watch((0, 1))
        model.open({0: (5, 6, 7)})
        model.extend({0: NodeBlock((3, 4, 9), (-1, 0, 0))})
        model.commit({0: (0, 2)})
        states.append(watched.take(0).cpu())
    torch.testing.assert_close(states[1], states[0], atol=LARGEST_DIFFERENCE, rtol=0)


class Deaf(pretend.Rerun):
    """Gives what the first run gave."""

    def __call__(self, work):
        _, outputs = super().__call__(work)
        first = work()
        for held, new in zip(outputs, first, strict=True):
            held.copy_(new)
        return lambda: None, outputs


class TestRefusals:
    def test_a_recording_that_is_wrong(self, device):
        with pytest.raises(
            BackendError, match="captured, has other logits than the network: .* from a float64 run"
        ):
            captured_forward(placed(network("llama", "sdpa"), device), Deaf())

    def test_a_network_that_waits_for_a_number(self, device):
        own = placed(network("llama", "sdpa"), device)
        own.model.norm.register_forward_pre_hook(
            lambda module, inputs: float(inputs[0].sum()) and None
        )
        with pytest.raises(
            BackendError,
            match=r"LlamaForCausalLM cannot be captured: "
            r"RuntimeError: .* waits for a number",
        ):
            captured_forward(own, pretend.Rerun())

    @pytest.mark.parametrize(
        ("name", "attention", "reason"),
        [
            ("bloom", "eager", "only networks that read trees are captured"),
            ("llama", "flex_attention", "runs attention 'flex_attention'; eager and sdpa are"),
        ],
    )
    def test_networks_that_cannot_be_captured(self, device, name, attention, reason):
        own = placed(network(name, "eager"), device)
        own.config._attn_implementation = attention
        with pytest.raises(BackendError, match=reason):
            captured_forward(own, pretend.Rerun())

    def test_a_device_without_graphs(self, device):
        with pytest.raises(BackendError, match="steps on meta are neither compiled nor captured"):
            GraphCapture(torch.device(device))


class TestModules:
    def test_a_program_has_the_numbers_of_the_module(self, device):
        own = OutputLayer(placed(network("llama", "sdpa"), device))
        capture = pretend.Rerun()
        states = torch.randn(11, 32, generator=torch.Generator().manual_seed(0))
        program = capture_module(own, (states[:1].to(device),), capture)
        count = capture.num_captured
        for rows in (1, 3, 11, 4, 11):
            (logits,) = program(states[:rows].to(device))
            (expected,) = own(states[:rows].to(device))
            torch.testing.assert_close(logits.held, expected.held)
        assert capture.num_captured - count <= 2  # widths 1 to 4 were captured by the check

    def test_steps_of_a_head_with_a_cache(self, device, tmp_path):
        """The graph sees the whole cache, whose unused columns are hidden, and is captured once a shape."""
        target = network("llama", "sdpa", num_hidden_layers=4)
        KINDS["eagle3"](32, target.config.vocab_size).write(tmp_path)
        capture = pretend.Rerun()
        graphs = HfTreeModel(
            placed(target, device), make_module=partial(capture_module, capture=capture)
        )
        heads = [
            model.head_model(*steps_of(load_head(tmp_path).float().to(where)))
            for model, where in ((HfTreeModel(target), "cpu"), (graphs, device))
        ]
        numbers = torch.Generator().manual_seed(1)
        for head in heads:
            head.open(0)
            head.open(1)
        count = capture.num_captured
        for _ in range(4):
            states, drafted = (torch.randn(4, width, generator=numbers) for width in (96, 32))
            chains = {0: NodeBlock.chain((5, 6, 7)), 1: NodeBlock.chain((8,))}
            blocks = {1: NodeBlock.chain((3, 4)), 0: NodeBlock((1, 2), (-1, -1))}
            expected, found = (
                [*head.read(chains, states.to(where)), *head.extend(blocks, drafted.to(where))]
                for head, where in zip(heads, ("cpu", device), strict=True)
            )
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.cpu(), other, atol=LARGEST_DIFFERENCE, rtol=0)
            for head in heads:
                head.drop(0)
                head.drop(1)
        assert capture.num_captured - count == 2

    def test_wide_inputs_run_as_they_are(self, device):
        own = OutputLayer(placed(network("llama", "sdpa"), device))
        program = ModuleGraph(own, pretend.Rerun())
        assert len(program(torch.zeros(65, 32).to(device))[0]) == 65


class TestTexts:
    @pytest.fixture
    def captures(self, monkeypatch):
        """Captures of the decoders that are loaded; functions are captured soon."""
        made = []
        make = lambda _: made.append(pretend.Rerun()) or made[-1]  # noqa: E731
        monkeypatch.setattr(cuda_graph, "GraphCapture", make)
        monkeypatch.setattr(cuda_graph, "FunctionGraphs", partial(FunctionGraphs, few_calls=2))
        return made

    @pytest.mark.parametrize(
        ("tree", "rules"),
        [
            ("chain(3)", {"temperature": 0}),
            ("chain(3)", TRUNCATED),
            ("fixed_width((2, 2))", {"temperature": 1.0}),
        ],
    )
    def test_are_those_of_the_host(self, device, captures, tree, rules):
        pair, settings = (
            (network("llama", "sdpa"), perturbed(network("llama", "sdpa"))),
            {"tree": tree},
        )
        settings["controller"] = "fixed"
        expected = written(monge.load(*pair, **settings), rules)
        own = [placed(model, device) for model in pair]
        decoder = monge.load(*own, backend="compiled", **settings)
        counts = [capture.num_captured for capture in captures]
        assert written(decoder, rules) == expected
        (before, *other), (after, *same) = counts, [one.num_captured for one in captures]
        assert other == same, "captured inside a text"
        # Verdicts are captured once they come again.
        assert after - before <= 1
        assert len(captures) == 2

    @pytest.mark.parametrize("rules", [{"temperature": 0}, TRUNCATED])
    def test_with_a_head_are_those_of_the_host(self, device, captures, tmp_path, rules):
        target = network("llama", "sdpa")
        KINDS["eagle3"](32, target.config.vocab_size).write(tmp_path)
        settings = {"tree": "chain(3)", "controller": "fixed"}
        expected = written(monge.load(target, str(tmp_path), **settings), rules)
        decoder = monge.load(placed(target, device), str(tmp_path), backend="compiled", **settings)
        assert written(decoder, rules) == expected
        (capture,) = captures
        count = capture.num_captured
        assert written(decoder, rules) == expected
        # The cache stays where it is, so its graphs do; verdicts are captured once they come again.
        assert capture.num_captured - count <= 3

    @pytest.mark.parametrize(("drafter", "nodes"), [("none", 1), ("ngram(3)", 5)])
    def test_no_wider_blocks_are_prepared_than_a_drafter_asks_for(
        self, device, monkeypatch, caplog, drafter, nodes
    ):
        monkeypatch.setattr(cuda_graph, "GraphCapture", lambda _: pretend.Rerun())
        target = placed(network("llama", "sdpa"), device)
        with caplog.at_level("INFO", logger="monge"):
            monge.load(target, drafter=drafter, backend="compiled")
        (told,) = (one.message for one in caplog.records if "CUDA graphs captured" in one.message)
        assert f"and {nodes} node" in told

    def test_what_cannot_be_recorded_runs_as_it_is(self, device):
        target = network("llama", "sdpa")
        reason = "backend 'compiled' is not used, the network runs eagerly: steps on meta"
        with pytest.warns(UserWarning, match=reason):
            decoder = monge.load(placed(target, device), drafter="none", backend="compiled")
        plain = monge.load(target, drafter="none")
        assert written(decoder, {"temperature": 0}) == written(plain, {"temperature": 0})


def written(decoder, rules):
    results = decoder.generate(list(prompts((9, 4), seed=5)), max_new_tokens=10, seed=3, **rules)
    return [result.token_ids for result in results]


def test_chains_behind_logits_of_another_type_are_left_to_levels():
    """Rounded to the type of the graph, they would be another law."""
    starts, shape = (
        torch.tensor([4]),
        LevelShape(widths=(1, 1), kind=Iid),
    )
    chain = ChainGraph(pretend.Rerun(), lambda *_: torch.zeros(1, 1, 7), starts, "sampled", None)
    uniforms = torch.zeros(1, 2, dtype=torch.float64)
    for dtype, is_drawn in ((torch.float32, True), (torch.float64, False)):
        given = LevelDraws(torch.zeros(1, 1, 7, dtype=dtype), uniforms, shape, [SamplingRules()])
        assert (chain.draw(given, slice(0, 1), (4,)) is not None) == is_drawn


def test_chains_write_over_no_other_text():
    """Rows of a graph that have no chain, whichever had one before, write behind all texts."""
    starts, seen = torch.tensor([20, 20, 20, 20]), []

    def read(token_ids, lengths):
        seen.append(lengths.clone())
        return torch.zeros(4, 1, 7)

    shape = LevelShape(widths=(1, 1, 1), kind=Iid)
    chain = ChainGraph(pretend.Rerun(), read, starts, "sampled", None)
    for rows, lengths in ((slice(0, 3), (5, 6, 7)), (slice(2, 4), (9, 4)), (slice(1, 2), (8,))):
        seen.clear()
        count = len(lengths)
        uniforms = torch.zeros(count, 3, dtype=torch.float64)
        rules = [SamplingRules()] * count
        chain.draw(LevelDraws(torch.zeros(count, 1, 7), uniforms, shape, rules), rows, lengths)
        expected = starts.clone()
        expected[rows] = torch.tensor(lengths)
        assert [one.tolist() for one in seen] == [(expected + step).tolist() for step in range(2)]
