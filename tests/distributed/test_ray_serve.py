"""The application that Ray Serve runs, and its options; `test_ray.py` runs it on a cluster."""

import inspect
import re
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient
from pydantic import ValidationError
from typer.testing import CliRunner

import monge
from monge.cli.app import app as commands
from monge.core.errors import OptionError
from monge.distributed import ray_serve, shared_metrics
from monge.distributed.ray_serve import AppArgs, Replica, replica_app
from monge.distributed.retry_proxy import CONTROLLER_OPTIONS
from monge.distributed.shared_metrics import merged, metrics_actor_class
from tests.serve.served import samples

GUIDE = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.fixture
def replica(tables):
    board = metrics_actor_class()()

    def make(engine, served_model_name="toy", **args):
        args = AppArgs(served_model_name=served_model_name, **args)
        gather = lambda own: merged(board.exchange(engine, list(own)))  # noqa: E731
        return replica_app(args, engine=engine, gather=gather)[0]

    return make


def ask(client):
    asked = {"prompt": "abc", "max_tokens": 6, "seed": 1}
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 200
    return answer.json()["choices"][0]["text"]


def counted(text, name):
    """Return samples of a counter, by the label `engine`."""
    return {one.labels["engine"]: one.value for one in samples(text) if one.name == name}


def test_every_replica_shows_what_all_of_them_measured(replica):
    with TestClient(replica("one")) as one, TestClient(replica("two")) as two:
        assert ask(one) == ask(two)
        ask(two)
        two.get("/metrics")
        text = one.get("/metrics").text
        assert counted(text, "vllm:generation_tokens_total") == {"one": 6, "two": 12}
        assert counted(text, "monge:http_requests_total")["one"] == 1
        assert text.count("# TYPE vllm:generation_tokens_total counter") == 1
        assert two.get("/metrics").text.count("vllm:time_to_first_token_seconds_count{") == 2


def test_a_silent_replica_is_forgotten(monkeypatch):
    board, now = metrics_actor_class()(), [0.0]
    monkeypatch.setattr(shared_metrics.time, "monotonic", lambda: now[0])
    board.exchange("one", ["first"])
    assert board.exchange("two", ["second"]) == [["first"], ["second"]]
    now[0] = 11.0
    assert board.exchange("two", ["third"]) == [["third"]]


def test_health_is_that_of_the_scheduler(replica):
    checked = Replica()
    checked.app = replica("one")
    with TestClient(checked.app):
        checked.check_health()
    with pytest.raises(RuntimeError, match="not serving: shutting down"):
        checked.check_health()


def test_args_mean_what_options_mean(replica):
    args = {"api_keys": ("secret",), "request_timeout_s": 0, "max_waiting": 3}
    with TestClient(replica("one", **args)) as client:
        assert client.get("/v1/models").status_code == 401
        models = client.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert models.json()["data"][0]["id"] == "toy"
    with pytest.raises(OptionError, match="must be one word"):
        replica("one", served_model_name="")


def test_args_are_those_of_a_configuration():
    with pytest.raises(ValidationError, match="replica\n"):
        AppArgs.model_validate({"replica": 2})
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        AppArgs.model_validate({"graceful_timeout_s": -1})
    assert AppArgs.model_validate({"drain_s": 7}).graceful_timeout_s == 7, "its former name"
    assert AppArgs.model_validate({"exact_numerics": True}).batch_invariant, "its former name"
    parsed = AppArgs.model_validate(yaml.safe_load("controller: [goodput, fixed]"))
    assert parsed.controller == ("goodput", "fixed")
    assert AppArgs.model_validate({"controller": "goodput"}).controller == "goodput"
    objects = AppArgs(drafter=monge.Pool(monge.Ngram(), monge.Model()), controller=monge.Fixed())
    assert (objects.drafter, objects.controller) == ("pool(ngram, model)", "fixed")


def test_deployment_options():
    args = AppArgs(replicas=3, max_batch_size=4, gpus_per_replica=1, graceful_timeout_s=7)
    fixed = ray_serve._deployment(args)
    assert (fixed["num_replicas"], fixed["max_ongoing_requests"]) == (3, 8)
    assert fixed["graceful_shutdown_timeout_s"] == 7
    assert fixed["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}
    scaling = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}
    scaled = ray_serve._deployment(AppArgs(replicas="1-4"))
    assert scaled["autoscaling_config"] == scaling
    assert "num_replicas" not in scaled
    assert ray_serve._deployment(AppArgs())["num_replicas"] == 1


@pytest.mark.parametrize("text", ["3-2", "many", "0", "-1", "1:4", "1-", "-", "", "1-4-6", "0-0"])
def test_numbers_of_replicas_that_cannot_be(text):
    with pytest.raises(OptionError, match=rf"as in 1-4; got '{text}'"):
        ray_serve._deployment(AppArgs(replicas=text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--replicas 2", "--replicas needs --ray"),
        ("--address auto", "--address needs --ray"),
        ("--ray --port 0", "--ray needs a port"),
        ("--ray --access-log", "--access-log is not for --ray"),
        ("--ray --replicas many", "as in 1-4; got 'many'"),
        ("--ray --replicas 0", "as in 1-4; got '0'"),
        ("--ray --graceful-timeout -1", "--graceful-timeout must be at least 0; got -1"),
        ("--ray", 'a cluster needs ray, which cannot be found: pip install ".[distributed]"'),
    ],
)
def test_invalid_options(arguments, message, without):
    without("ray")
    result = CliRunner().invoke(commands, ["serve", *arguments.split()])
    assert result.exit_code == 2
    assert message in result.stderr


def test_configuration_of_the_guide():
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    configuration = yaml.safe_load(block)
    assert configuration["controller_options"] == CONTROLLER_OPTIONS
    (application,) = configuration["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == (ray_serve.__name__, ray_serve.app_from.__name__)
    # Ray reads the arguments as the type that the builder declares.
    (declared,) = inspect.signature(ray_serve.app_from).parameters.values()
    args = declared.annotation.model_validate(application["args"])
    assert (args.replicas, args.tree) == ("1-8", "chain(6)")
