"""lm-eval in process and over HTTP, compared with its own `hf` model; run by `make test-lm-eval`."""

import json
import os
import subprocess
import sys
import warnings

import pytest

from monge.api import built_in
from monge.core.errors import MongeError
from tests.plugins.local_tasks import CHOSEN, QUESTIONS, WRITTEN, write_tasks
from tests.serve.served import live

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lm_eval = pytest.importorskip(
        "lm_eval", reason="needs lm-eval; make test-lm-eval makes its environment"
    )
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    from monge.plugins import lm_eval as plugin

pytestmark = pytest.mark.filterwarnings("default")
TARGET, DRAFT = str(built_in("target")), str(built_in("draft"))
SPECULATION = {
    "draft model": {"draft_model": DRAFT},
    "tree": {"draft_model": DRAFT, "tree": "fixed_width((2, 2))"},
    "n-grams": {},
    "adaptive": {"draft_model": DRAFT, "controller": "fsm"},
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    plugin.register()
    plugin.register()  # a second time does nothing


def evaluated(name, folder, /, *, batch_size=4, tasks=(WRITTEN, CHOSEN), **arguments):
    """Scores by task, and what was answered to every document."""
    results = lm_eval.simple_evaluate(
        model=name,
        model_args=arguments,
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    scores, answers = {}, {}
    for task in tasks:
        found, samples = results["results"][task], results["samples"][task]
        scores[task] = {name: one for name, one in found.items() if isinstance(one, float)}
        answers[task] = {json.dumps(one["doc"], sort_keys=True): one["resps"] for one in samples}
    return scores, answers


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def plain(tasks):
    return evaluated("hf", tasks, pretrained=TARGET, dtype="float32")


def test_the_tasks_tell_models_apart(plain):
    scores, answers = plain
    assert 0.0 < scores[WRITTEN]["exact_match,none"] < 1.0
    assert 0.0 < scores[CHOSEN]["acc,none"] < 1.0
    assert len({json.dumps(answer) for answer in answers[WRITTEN].values()}) > len(QUESTIONS) // 2


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("speculation", SPECULATION.values(), ids=SPECULATION)
def test_texts_and_scores_are_those_of_hf(tasks, plain, speculation, batch_size):
    settings = {"batch_size": batch_size, "tasks": [WRITTEN]} | speculation
    scores, answers = evaluated("monge", tasks, pretrained=TARGET, dtype="float32", **settings)
    assert answers[WRITTEN] == plain[1][WRITTEN]
    assert scores[WRITTEN] == plain[0][WRITTEN]


def test_likelihoods_are_those_of_hf(tasks, plain):
    settings = {"draft_model": DRAFT, "tasks": [CHOSEN]}
    scores, answers = evaluated("monge", tasks, pretrained=TARGET, dtype="float32", **settings)
    assert answers[CHOSEN] == plain[1][CHOSEN]
    assert scores[CHOSEN] == plain[0][CHOSEN]


@pytest.mark.parametrize("until", [(" the", "'"), ("is the", "\n\n"), ("no such text",)], ids=str)
def test_stops_of_several_tokens_inside_a_block(tmp_path, until):
    folder = write_tasks(tmp_path / "tasks", until=until)
    arguments = {"pretrained": TARGET, "dtype": "float32", "tasks": [WRITTEN]}
    _, ours = evaluated("monge", folder, draft_model=DRAFT, **arguments)
    assert ours == evaluated("hf", folder, **arguments)[1]


def test_scores_over_http_are_those_in_process(tasks, plain):
    from monge.api import load
    from monge.options import ServeOptions
    from monge.serve.http.app import create_app

    decoder = load(max_batch_size=4)
    app = create_app(decoder, ServeOptions(served_model_name="built-in"))
    with live(app) as url:
        arguments = {"model": "built-in", "base_url": f"{url}/v1/completions", "tokenizer": TARGET}
        arguments |= {"num_concurrent": 3, "batch_size": 1, "max_length": 512}
        scores, answers = evaluated("local-completions", tasks, **arguments)
    assert answers[WRITTEN] == plain[1][WRITTEN]
    assert scores[WRITTEN] == plain[0][WRITTEN]
    assert scores[CHOSEN] == plain[0][CHOSEN]
    for document, resps in answers[CHOSEN].items():
        for ((ours, greedy),), ((theirs, is_greedy),) in zip(
            resps, plain[1][CHOSEN][document], strict=True
        ):
            assert float(ours) == pytest.approx(float(theirs), abs=1e-4)
            assert greedy == is_greedy


def test_command_line(tasks, plain, tmp_path):
    arguments = f"pretrained={TARGET},draft_model={DRAFT},dtype=float32,tree=chain(3)"
    settings = {"model": "monge", "tasks": WRITTEN, "model_args": arguments, "batch_size": "4"}
    settings |= {"include_path": tasks, "device": "cpu", "output_path": tmp_path, "seed": "1"}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "monge.plugins.lm_eval", "run", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.rglob("results*.json")
    results = json.loads(written.read_text())["results"][WRITTEN]
    assert results["exact_match,none"] == plain[0][WRITTEN]["exact_match,none"]


def test_sampling_follows_the_seed(tasks):
    settings = {"dtype": "float32", "device": "cpu", "batch_size": 2, "seed": 7}
    model = get_model("monge")(pretrained=TARGET, draft_model=DRAFT, **settings)
    context, mask = model.tok_batch_encode(["The history of", "Once upon a time"])
    given = {"context": context, "attention_mask": mask, "max_length": 30, "stop": ["\n"]}
    first, second = (
        model._model_generate(**given, do_sample=True, temperature=0.9) for _ in range(2)
    )
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tree": "chian(3)", "draft_model": DRAFT}, "unknown tree 'chian'"),
        ({"draft_model": "./no-such-folder"}, "no-such-folder"),
        ({"drafter": "model"}, "needs a draft model"),
        ({"controller": "goodputt"}, "did you mean 'goodput'"),
        ({"mixed_precision_dtype": "bfloat16"}, "does not support mixed_precision_dtype"),
    ],
    ids=["tree", "folder", "missing", "controller", "precision"],
)
def test_bad_arguments_are_refused_before_anything_is_decoded(arguments, message):
    with pytest.raises(MongeError, match=message):
        get_model("monge")(pretrained=TARGET, dtype="float32", device="cpu", **arguments)
