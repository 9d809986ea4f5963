"""Ray Data and Ray Serve on a cluster of two nodes, simulated on this machine.

The commands as their users type them.
"""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import httpx
import pytest

from monge.api import load
from tests.bench.tiny import save_pair

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs Ray: make test-distributed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

COMPLETION = {"prompt": "The history of", "max_tokens": 48, "temperature": 0.8, "ignore_eos": True}
SAMPLED = {"max_new_tokens": 48, "temperature": 0.8, "seed": 1, "ignore_eos": True}
ONE_ROW_IS_BAD = 1
"""Status of the command."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def address():
    """Of a cluster whose nodes have one core each, so that two replicas or workers of one core lie on two nodes."""
    # Ray's processes are as polite as they can be, and starve on a machine that is busy otherwise.
    os.environ |= {
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def command(*arguments):
    return [sys.executable, "-m", "monge", *map(str, arguments)]


def pids_of(name):
    """Ray's processes of a kind; they name themselves."""
    listed = subprocess.check_output(["ps", "-eo", "pid,args"], text=True).splitlines()
    found = [line for line in listed if f"ray::{name}" in line and "defunct" not in line]
    return [int(line.split()[0]) for line in found]


def wait_for(condition, seconds=240, pause=0.5):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(pause)
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    source = tmp_path_factory.mktemp("rows") / "in.jsonl"
    lines = [json.dumps({"prompt": f"Number {number}", "id": number}) for number in range(60)]
    source.write_text("\n".join([*lines, "not json", '{"prompt": "zero\\u0000"}\0']))
    return source


@pytest.fixture(scope="module")
def batch(rows, pair):
    def run(name, *arguments):
        output = rows.with_name(name)
        options = ("--seed", 3, "--temperature", 0.9, "--max-new-tokens", 200)
        pair_options = ("--target", pair[0], "--draft", pair[1])
        return output, command("batch", rows, output, *pair_options, *options, *arguments)

    return run


@pytest.fixture(scope="module")
def expected(batch):
    output, asked = batch("alone.jsonl")
    assert subprocess.run(asked, check=False, timeout=300).returncode == ONE_ROW_IS_BAD
    return output.read_bytes()


def test_workers_on_two_nodes_write_the_same_bytes(batch, expected, address):
    output, asked = batch("two.jsonl", "--ray", "--address", address, "--workers", 2)
    assert subprocess.run(asked, check=False, timeout=400).returncode == ONE_ROW_IS_BAD
    assert output.read_bytes() == expected


def test_a_batch_survives_a_killed_worker_and_a_killed_driver(batch, expected, address):
    output, asked = batch("killed.jsonl", "--ray", "--address", address, "--workers", 1)
    with subprocess.Popen(asked) as process:
        wait_for(lambda: output.exists() and output.stat().st_size, pause=0.02)
        process.kill()
    assert (size := output.stat().st_size) < len(expected)
    wait_for(lambda: not pids_of("MapWorker"))
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: output.stat().st_size > size, pause=0.02)
        for pid in pids_of("MapWorker"):
            os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=400)
    assert process.returncode == ONE_ROW_IS_BAD
    assert "going on after" in said
    assert output.read_bytes() == expected


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def configured(folder, address, **application):
    """`serve run` of a file, as the guide has it; gives its address."""
    port, file = free_port(), folder / "serve.yaml"
    place = {"import_path": "monge.distributed.ray_serve:app_from", "route_prefix": "/"}
    applications = [{"name": "monge", **place, **application}]
    file.write_text(json.dumps({"http_options": {"port": port}, "applications": applications}))
    serve = (sys.executable, "-m", "ray.serve.scripts")
    with subprocess.Popen([*serve, "run", "--address", address, file]) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: process.poll() is not None or is_ready(url))
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def is_ready(url):
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready", timeout=60).status_code == 200
    return False


@contextmanager
def served(pair, address, *options):
    """`monge serve --ray`; gives its address and the process."""
    where = ("--ray", "--address", address, "--port", free_port())
    asked = command("serve", *pair, *where, "--max-batch-size", 4, *options)
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            told = ""
            while not (found := re.search(r"serving at (\S+)/v1", told)):
                line = process.stderr.readline()
                assert line, told
                told += line
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield found[1], process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(120)


def ask(url, seed, **fields):
    asked = COMPLETION | {"seed": seed} | fields
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=300)
    if answer.status_code != 200:
        return answer.status_code, answer.text
    return 200, answer.json()["choices"][0]["text"]


def generated(url):
    """Tokens that each replica has generated, as the metrics tell."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.findall(
        r'^vllm:generation_tokens_total\{engine="(\w+)".*\} (\S+)$', text, re.MULTILINE
    )
    return {engine: float(count) for engine, count in found}


WITH_USAGE = COMPLETION | {"seed": 1, "stream": True, "stream_options": {"include_usage": True}}


def stream(url, body=WITH_USAGE):
    """Yield the events of a stream."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def test_two_replicas_serve_as_one(pair, address):
    (offline,) = load(*pair).generate("The history of", **SAMPLED)
    with served(pair, address, "--replicas", 2) as (url, process):
        assert {ask(url, 1) for _ in range(8)} == {(200, offline.text)}
        wait_for(lambda: len(generated(url)) == 2)
        *chunks, last = stream(url)
        assert len(chunks) > 1
        texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
        assert "".join(texts) == offline.text
        assert last["usage"]["completion_tokens"] == 48
        kill_one_of_two_under_load(url)
        break_streams_off(url)
        wait_for(lambda: len(pids_of("ServeReplica")) == 2)
        wait_for(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 200)
        chunks = stream(url)
        first = next(chunks)
        process.send_signal(signal.SIGTERM)
        *_, last = chunks
        assert first["choices"]
        assert last["usage"]["completion_tokens"] == 48
        assert process.wait(120) == 0


@contextmanager
def asking(url, expected, num_clients):
    """Clients that ask for texts of known seeds, one after another.

    Gives what they were told, and checks it in the end.
    """
    told, ended = [], threading.Event()

    def client(number):
        while not ended.is_set():
            seed = number % len(expected)
            told.append((seed, ask(url, seed)))
            number += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    for one in clients:
        one.start()
    try:
        yield told
    finally:
        ended.set()
        for one in clients:
            one.join()
    assert told
    assert all(answer == expected[seed] for seed, answer in told)


def kill_one_of_two_under_load(url):
    before = generated(url).keys()
    # Whoever was on the lost replica is served by the other one: everybody gets the text of the
    # seed.
    with asking(url, {seed: ask(url, seed) for seed in range(3)}, num_clients=4) as told:
        wait_for(lambda: len(told) > 8)
        victim = pids_of("ServeReplica")[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(
            lambda: len(pids_of("ServeReplica")) == 2 and len(generated(url).keys() - before) == 1
        )
        num_before = len(told)
        wait_for(lambda: len(told) > num_before + 12)


def test_replicas_come_with_load_and_go_after_it(pair, address, tmp_path):
    def see(what, *counts):  # shown by --log-cli-level=INFO
        logging.getLogger(__name__).info(f"%.0f s: {what}", time.monotonic() - start, *counts)

    decoder = load(*pair, controller=("fixed", "fsm"))
    (offline,) = decoder.generate("The history of", controller="fsm", **SAMPLED)
    options = {"max_batch_size": 4, "replicas": "1-2", "controller": ["fixed", "fsm"]}
    options |= {"target": str(pair[0]), "draft": str(pair[1])}
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4}
    scaling |= {"upscale_delay_s": 2, "downscale_delay_s": 5}
    deployments = [{"name": "monge", "autoscaling_config": scaling}]
    with configured(tmp_path, address, args=options, deployments=deployments) as url:
        expected = {seed: ask(url, seed) for seed in range(3)}
        assert {status for status, _ in expected.values()} == {200}
        assert ask(url, 1, speculation={"controller": "fsm"}) == (200, offline.text)
        assert len(pids_of("ServeReplica")) == 1
        start = time.monotonic()
        see("one replica; 12 clients begin")
        with asking(url, expected, num_clients=12) as crowd:
            wait_for(lambda: len(pids_of("ServeReplica")) == 2)
            see("the second replica starts; %d answers so far", len(crowd))
            wait_for(lambda: len(generated(url)) == 2 and min(generated(url).values()) > 0)
            see("it has written; %d answers so far", len(crowd))
        see("11 clients leave; %d answers, all of them the texts of their seeds", len(crowd))
        with asking(url, expected, num_clients=1) as rest:
            wait_for(lambda: len(pids_of("ServeReplica")) == 1)
            see("one replica is gone; %d answers since", len(rest))
            num_before = len(rest)
            wait_for(lambda: len(rest) > num_before + 3)
        see("%d answers since, all of them the texts of their seeds", len(rest))


def break_streams_off(url):
    """Kill a replica while it streams.

    What was sent stays true, and the end says that it is none.
    """
    body = COMPLETION | {"max_tokens": 1500, "stream": True}
    whole = {seed: ask(url, seed, max_tokens=1500)[1] for seed in range(4)}
    told, begun = {}, [threading.Event() for _ in whole]

    def client(seed):
        told[seed] = []
        for event in stream(url, body | {"seed": seed}):
            told[seed].append(event)
            begun[seed].set()

    clients = [threading.Thread(target=client, args=(seed,)) for seed in whole]
    for one in clients:
        one.start()
    assert all(one.wait(120) for one in begun)
    os.kill(pids_of("ServeReplica")[0], signal.SIGKILL)
    for one in clients:
        one.join()
    broken = [seed for seed, events in told.items() if "error" in events[-1]]
    assert broken, "no stream ran on the replica that was killed"
    for seed, events in told.items():
        expected = whole[seed]
        text = "".join(event["choices"][0]["text"] for event in events if "error" not in event)
        if seed in broken:
            assert events[-1]["error"]["code"] == "replica_lost"
            assert expected.startswith(text)
        else:
            assert text == expected
