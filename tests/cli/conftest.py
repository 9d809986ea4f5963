import pytest
from typer.testing import CliRunner

from monge.cli.app import app
from tests.bench.tiny import save_pair


@pytest.fixture(scope="session")
def tiny_paths(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run():
    """Run the command as a user would; standard output and standard error apart."""
    runner = CliRunner()

    def invoke(*arguments, stdin=None):
        return runner.invoke(app, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)

    return invoke


@pytest.fixture
def generate(run, tiny_paths):
    """`monge generate` on the tiny pair."""
    target, draft = tiny_paths
    return lambda *arguments, **options: run("generate", *arguments, "--target", target, "--draft", draft, **options)
