"""The same claims on a CUDA device.

Node logits, greedy identity, the compiled flex_attention kernel.
"""

import copy
import warnings

import pytest
import torch

import monge
from monge.backends.cuda import GraphCapture
from tests.engine import cuda_waits
from tests.engine.compiling import captured_forward
from tests.engine.tiny import network, padded, perturbed, prompts
from tests.heads.readers.published import eagle3
from tests.parity.comparing import RandomGrowth

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler's own warnings

LARGEST_DIFFERENCE = 1e-4
"""Between float32 forwards with other kernels for other shapes; TF32 is off by default."""
ROWS = prompts((9, 4, 7, 11), seed=5)


def on_gpu(model):
    return copy.deepcopy(model).to("cuda")


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize(
    "name", ["llama", "mistral_window", "gemma3", "gpt2", "mixtral", "deepseek_v3"]
)
def test_node_logits(name, attention):
    if (name, attention) in {("gpt2", "flex_attention"), ("deepseek_v3", "flex_attention")}:
        pytest.skip("head sizes too small for the compiled kernel")
    sizes = {"head_dim": 16} if attention == "flex_attention" else {}
    if attention == "flex_attention":
        sizes |= {"hidden_size": 64}
    growth = RandomGrowth(
        on_gpu(network(name, attention, **sizes)),
        ROWS[:3],
        seed=2,
        reference=network(name, **sizes),
    )
    differences = [growth.round(compare=True) for _ in range(4)]
    assert growth.non_prefix_commits > 4
    assert max(differences) < LARGEST_DIFFERENCE, differences


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma3", "mixtral"])
def test_speculate_is_greedy(name, attention):
    target, draft = on_gpu(network(name, attention)), on_gpu(perturbed(network(name, attention)))
    inputs = {key: value.to("cuda") for key, value in padded(ROWS).items()}
    settings = {"do_sample": False, "max_new_tokens": 24, "repetition_penalty": 1.2}
    plain = target.generate(**inputs, **settings)
    ours = target.generate(**inputs, **settings, custom_generate=monge.speculate, draft_model=draft)
    assert torch.equal(ours, plain)
    assert ours.device.type == "cuda"


def test_sampling_is_reproducible():
    target, draft = on_gpu(network("llama", "sdpa")), on_gpu(perturbed(network("llama", "sdpa")))
    inputs = {key: value.to("cuda") for key, value in padded(ROWS).items()}
    settings = {
        "do_sample": True,
        "max_new_tokens": 24,
        "top_p": 0.9,
        "custom_generate": monge.speculate,
        "draft_model": draft,
    }
    first, again, other = (target.generate(**inputs, **settings, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("tree", ["chain(3)", "fixed_width((2, 2, 1))"])
def test_sampled_texts_are_those_of_the_cpu_and_seldom_wait(tree):
    """Once for the draft and once for the verdicts of a round; a prompt, and the network's own code, may wait too."""
    pair = network("llama", "sdpa"), perturbed(network("llama", "sdpa"))

    def written(target, draft):
        decoder = monge.load(target, draft, tree=tree, controller="fixed", max_batch_size=1)
        results = decoder.generate(
            list(ROWS), max_new_tokens=24, temperature=1.0, seed=3, ignore_eos=True
        )
        return [one.token_ids for one in results], sum(one.stats.num_rounds for one in results)

    with cuda_waits.counted() as waits:
        found, num_rounds = written(*map(on_gpu, pair))
        num_waits = waits()
    assert found == written(*pair)[0]
    assert num_rounds <= num_waits <= 3 * num_rounds + 3 * len(ROWS)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma3", "gpt2"])
def test_captured_node_logits(name):
    own = on_gpu(network(name, "sdpa"))
    step = captured_forward(own, GraphCapture(own.device))
    growth = RandomGrowth(own, ROWS[:3], seed=2, reference=network(name), step=step)
    assert max(growth.round(compare=True) for _ in range(6)) < LARGEST_DIFFERENCE


@pytest.mark.parametrize("rules", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_captured_texts(rules):
    target, draft = on_gpu(network("llama", "sdpa")), on_gpu(perturbed(network("llama", "sdpa")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one would say that the network runs eagerly
        decoder = monge.load(target, draft, backend="compiled", controller="fixed")
        results = decoder.generate(list(ROWS), max_new_tokens=24, seed=3, **rules)
    expected = monge.load(target, draft, controller="fixed").generate(
        list(ROWS), max_new_tokens=24, seed=3, **rules
    )
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_steps_of_a_head(temperature, tmp_path):
    own = network("llama", "sdpa")
    config = own.config
    folder = eagle3(config.hidden_size, config.vocab_size).write(tmp_path / "head")
    settings = {"max_new_tokens": 24, "seed": 3, "temperature": temperature}

    def texts(backend):
        decoder = monge.load(
            on_gpu(own), str(folder), tree="chain(3)", backend=backend, controller="fixed"
        )
        return [result.token_ids for result in decoder.generate(list(ROWS), **settings)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one would say that a part of the head runs eagerly
        captured = texts("compiled")
    assert captured == texts("eager")
