"""EAGLE-3 heads from the training: they compute what their reader computes, improve, and draft for the target."""

import copy
import json

import pytest
import torch

import monge
from monge.backends.cpu.packed_linear import PackedLinear, pack_linears
from monge.backends.registry import Backend
from monge.core.errors import OptionError, UnsupportedModelError
from monge.heads.readers.registry import load_head
from monge.networks.base import NodeBlock
from monge.networks.head_model import CachedHead
from monge.networks.hf_tree import HfTreeModel
from monge.training import own_text
from monge.training.eagle3 import (
    Eagle3Trainee,
    _log_z,
    _Loss,
    faster_copy,
    train_eagle3,
)
from monge.training.loop import Recipe, Watch
from monge.training.own_text import ANSWERS, AnswerSettings, write_answers, write_prompts
from monge.training.texts import Texts, feature_model, read_texts
from tests.engine.tiny import VOCAB, network
from tests.heads.readers.published import sizes, steps_of

STEPS, SIZE, HIDDEN = 3, 11, 16


def conversations(lengths=(9, 12), given=3):
    draws, total = torch.Generator().manual_seed(0), sum(lengths)
    return Texts(
        starts=(0, *torch.tensor(lengths).cumsum(0).tolist()),
        token_ids=torch.randint(SIZE, (total,), generator=draws),
        is_learnt=torch.cat([torch.arange(length) >= given for length in lengths]),
        features=torch.randn(total, 3 * HIDDEN, generator=draws),
        states=torch.randn(total, HIDDEN, generator=draws),
        log_z=torch.randn(total, generator=draws).abs() + 5,
    )


@pytest.fixture
def trainee():
    draws, ids = torch.Generator().manual_seed(1), torch.tensor([0, 2, 3, 7, 10])
    made = Eagle3Trainee(
        fitted=conversations(),
        embeddings=torch.randn(SIZE, HIDDEN, generator=draws),
        output=torch.randn(len(ids), HIDDEN, generator=draws),
        norm=torch.rand(HIDDEN, generator=draws) + 0.5,
        draft_ids=ids,
        config=sizes(HIDDEN, SIZE),
        num_steps=STEPS,
    )
    for tensor in made.tensors.values():  # what starts as zero would hide mistakes
        tensor.data += 0.3 * torch.randn(tensor.shape, generator=draws)
    return made


def test_chains_of_the_training_are_those_of_the_reader(trainee):
    """The chain that starts at place t sees the true states up to t, and its own predictions after that."""
    text, head = trainee.fitted.batch(1, 1), trainee.head
    tokens, embed = text.token_ids[0], trainee.embeddings
    steps = [step.drafted for step in trainee._steps(text)]
    learnt = text.is_learnt[0].unfold(0, STEPS, 1).all(dim=1)[2:][: len(tokens) - 1 - STEPS]
    places = learnt.nonzero()[:, 0].tolist()
    assert len(places) > 3
    for row, place in enumerate(places):
        read, step = steps_of(head)
        read.embedding = step.embedding = lambda token_ids: embed[token_ids]
        cached = CachedHead(read, step, step, embed[:1])
        cached.open(0)
        chain = NodeBlock.chain(tokens[1 : place + 2].tolist())
        states, drafted = cached.read({0: chain}, text.features[0, : place + 1])
        for number in range(STEPS):
            expected = steps[number][row].detach()
            torch.testing.assert_close(expected, drafted[0], atol=1e-4, rtol=1e-4)
            following = int(tokens[place + 2 + number])
            block = NodeBlock.chain((following,), after=number - 1)
            states, drafted = cached.extend({0: block}, states[-1:])


def test_figures_are_those_of_the_laws(trainee):
    """Acceptance of the first step by its definition, over the whole vocabulary; padding changes nothing."""
    first = [trainee.fitted.batch(row, count) for row, count in ((0, 1), (1, 1), (0, 2))]
    *alone, step = (next(iter(trainee._steps(rows))) for rows in first)
    drafted = torch.cat([one.drafted for one in alone])
    torch.testing.assert_close(drafted, step.drafted, atol=1e-5, rtol=1e-5)
    p = (step.true - step.log_z[:, None]).double().exp()
    agreed = torch.minimum(p, step.drafted.detach().double().softmax(dim=1)).sum(1).mean()
    assert trainee.quality(trainee.fitted).acceptance[0] == pytest.approx(float(agreed))


def test_the_loss_moves_to_the_total_variation(trainee):
    draws = torch.Generator()
    losses = [
        float(trainee.loss(30, draws.manual_seed(0), share).detach()) for share in (0.0, 0.5, 1.0)
    ]
    assert losses[0] != losses[2]
    assert losses[1] == pytest.approx((losses[0] + losses[2]) / 2, rel=1e-5)
    assert 0 <= losses[2] <= sum(trainee.decay**number for number in range(STEPS))


@pytest.mark.parametrize("variation", [0.0, 0.4, 1.0])
def test_gradients_of_the_loss_are_those_of_autograd(variation):
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, generator=draws, dtype=torch.float64, requires_grad=True)
    # Part of the mass lies outside the draft vocabulary.
    p = 0.9 * torch.randn(6, 11, generator=draws, dtype=torch.float64).softmax(1)
    log_q = logits.log_softmax(1)
    distance = 1 - torch.minimum(p, log_q.exp()).sum(1)
    expected = ((1 - variation) * -(p * log_q).sum(1) + variation * distance).mean()
    found = _Loss.apply(logits, p, variation)
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(torch.autograd.grad(3 * found, logits)[0], 3 * slope)


@pytest.fixture(scope="module")
def target():
    return network("llama", num_hidden_layers=6)


PROMPTS = [
    [3 + (7 * number + place) % (VOCAB - 3) for place in range(4 + number % 3)]
    for number in range(40)
]
ANSWERED = AnswerSettings(num_tokens=16, batch_size=16)


def test_greedy_answers_do_not_depend_on_their_neighbours(target, tmp_path):
    settings = AnswerSettings(num_tokens=8, batch_size=8, temperatures=(0.0,))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    written = write_answers(target, PROMPTS[:8], settings, tmp_path)
    assert [list(prompt) for prompt, _ in written] == PROMPTS[:8]
    for prompt, answer in written:
        alone = target.generate(torch.tensor([prompt]), **options)
        assert alone[0, len(prompt) :].tolist()[: len(answer)] == list(answer)


def test_sampled_answers_have_the_law_of_the_target(target, tmp_path):
    """The first token of many answers to one prompt, against its law at the temperature."""
    settings = AnswerSettings(num_tokens=1, batch_size=4000, temperatures=(0.7,))
    written = write_answers(target, [PROMPTS[0]] * 4000, settings, tmp_path)
    counts = torch.bincount(torch.tensor([answer[0] for _, answer in written]), minlength=VOCAB)
    with torch.no_grad():
        law = (target(torch.tensor([PROMPTS[0]])).logits[0, -1].double() / 0.7).softmax(0)
    # Expected distance of 4,000 draws: at most sqrt(VOCAB / 4000) / 2.
    assert float((counts / 4000 - law).abs().sum() / 2) < (VOCAB / 4000) ** 0.5


class Letters:
    """Token 5 is a space, every other one a letter."""

    def decode(self, ids):
        return "".join(" " if token == 5 else chr(97 + token % 26) for token in ids)


def test_the_target_writes_prompts(target, tmp_path, monkeypatch):
    monkeypatch.setattr(own_text, "_TURN", 6)
    monkeypatch.setattr(target.generation_config, "eos_token_id", list(range(0, VOCAB, 4)))
    texts = write_prompts(target, Letters(), (3, 4), 60, tmp_path, seed=1)
    settings = AnswerSettings(num_tokens=6, temperatures=(1.0,), seed=1)
    written = write_answers(target, [(3, 4)] * 60, settings, tmp_path)
    ended = [turn[:-1] for _, turn in written if len(turn) < 6]
    assert 0 < len(ended) < 60, "some turns were to end, and some not"
    assert set(texts) == {Letters().decode(ids).strip() for ids in ended} - {""}
    assert len(texts) == len(set(texts))


def test_states_are_those_of_the_network(target):
    pair = ((3, 4, 5, 6), (7, 8, 9, 10, 11))
    shorter = (pair[0], pair[1][:2])
    read = read_texts(feature_model(target), [pair, shorter, pair], (2, 3), batch_size=2)
    assert read.starts == (0, 6, 15, 24)
    read = read_texts(feature_model(target), [pair, shorter], (2, 3), longest=8, least=3)
    assert read.token_ids.tolist() == [*pair[0], *pair[1][:4]], "one is cut, the other left out"
    read = read_texts(feature_model(target), [pair, shorter], (2, 3))
    assert read.is_learnt.tolist() == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 5
    with torch.inference_mode():
        output = target(torch.tensor([[*pair[0], *pair[1]]]), output_hidden_states=True)
    states = output.hidden_states
    torch.testing.assert_close(read.features[6:], torch.cat([states[2], states[3]], -1)[0])
    torch.testing.assert_close(read.states[6:], states[-1][0])
    torch.testing.assert_close(_log_z(target, read.states)[6:], output.logits[0].logsumexp(-1))


def made(target, folder, recipe, **options):
    options = {"answers": ANSWERED, "draft_vocabulary": 48, "num_steps": 2} | options
    return train_eagle3(target, PROMPTS, folder, recipe=recipe, **options)


@pytest.fixture(scope="module")
def head_folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    recipe = Recipe(steps=60, batch_size=256, evaluate_every=20, learning_rate=1e-2)
    outcome = made(target, folder, recipe)
    history = outcome.progress.history
    assert history[-1][1] > history[0][1] or outcome.progress.best_step == 20
    again = made(target, folder, recipe)
    assert again.quality == outcome.quality, "a rerun goes on, and has nothing left to do"
    return folder


def test_a_head_is_read_and_drafts(target, head_folder):
    about = json.loads((head_folder / "config.json").read_text())["about"]
    assert 0 < about["draft_vocabulary_covers"] <= 1
    options = {"tree": "chain(2)", "controller": "fixed"}
    plain, drafted = monge.load(target, drafter="none"), monge.load(target, head_folder, **options)
    results = (one.generate(PROMPTS[:3], max_new_tokens=12) for one in (plain, drafted))
    for one, other in zip(*results, strict=True):
        assert one.token_ids == other.token_ids


def test_a_backend_stores_a_head_in_8_bits_and_leaves_a_loaded_one(target, head_folder):
    packed = []

    class Packing(Backend):
        def sequence_model(self, network):
            def pack(module):
                pack_linears(module, "int8")
                packed.append(module)

            return HfTreeModel(network, module_packer=pack)

    options = {"tree": "chain(2)", "controller": "fixed", "backend": Packing()}
    (expected,) = monge.load(target, drafter="none").generate(PROMPTS[:1], max_new_tokens=12)
    (found,) = monge.load(target, head_folder, **options).generate(PROMPTS[:1], max_new_tokens=12)
    assert found.token_ids == expected.token_ids
    (head,) = packed
    kinds = {one.panels.dtype for one in head.modules() if isinstance(one, PackedLinear)}
    assert kinds == {torch.uint8}
    monge.load(target, load_head(head_folder), **options)
    assert packed == [head], "whoever loaded a head keeps it as it is"


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("tree", ["chain(3)", "fixed_width((2, 2))"])
def test_texts_that_share_a_cache_are_drafted_as_each_alone(target, head_folder, tree, window):
    """Long and short texts at once, which end after each other: prompts are read whole."""
    head, texts = load_head(head_folder), [PROMPTS[0] * 6, *PROMPTS[1:3]]
    head.decoder[0].attention.window = window

    def records(batch_size):
        options = {"tree": tree, "controller": "fixed", "max_batch_size": batch_size}
        decoder = monge.load(target, head, **options)
        results = decoder.generate(texts, max_new_tokens=16, temperature=1, seed=3)
        return [(result.token_ids, result.stats.acceptance_histogram) for result in results]

    assert records(3) == records(1)


def test_short_answers_do_not_spoil_the_training(target, tmp_path):
    write_answers(faster_copy(target), PROMPTS, ANSWERED, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines()]
    for number, line in enumerate(lines):
        line["answer"] = line["answer"][: 1 + number % 5]
    (tmp_path / ANSWERS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    seen = []
    watch = Watch(on_step=lambda one: seen.append(one.loss))
    made(target, tmp_path, Recipe(steps=8, batch_size=8, evaluate_every=8), watch=watch)
    assert torch.tensor(seen).isfinite().all()


@pytest.mark.gpu
def test_training_on_a_gpu(tmp_path):
    on_gpu = copy.deepcopy(network("llama", num_hidden_layers=6)).to("cuda")
    recipe = Recipe(steps=4, batch_size=128, evaluate_every=2)
    assert made(on_gpu, tmp_path, recipe).quality is not None


def test_targets_and_texts_that_make_no_head_are_refused(target, tmp_path):
    options = {"recipe": Recipe(), "answers": ANSWERED}
    with pytest.raises(UnsupportedModelError, match="fuses three layers; this target has 2"):
        train_eagle3(network("llama"), PROMPTS, tmp_path, **options)
    with pytest.raises(OptionError, match="too few to fit"):
        train_eagle3(target, PROMPTS[:2], tmp_path, **options)
