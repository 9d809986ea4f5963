"""Clients that people have, unchanged, over a real socket."""

import asyncio
import socket
import time

import httpx
import openai
import pytest

from tests.serve.served import live, slow_decoder, toy_app, toy_decoder

PROMPT = "once upon"
TURNS = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url():
    with live(toy_app(settings={"api_keys": ("secret",)})) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def library_text(prompt=PROMPT, seed=1, **options):
    return (
        toy_decoder()
        .generate(prompt, seed=seed, **({"temperature": 1.0, "max_new_tokens": 12} | options))[0]
        .text
    )


def test_models(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "monge"


def test_completion(client):
    answer = client.completions.create(model="toy", prompt=PROMPT, seed=1, max_tokens=12)
    assert answer.choices[0].text == library_text()
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_chat(client):
    answer = client.chat.completions.create(
        model="toy", messages=TURNS, seed=1, max_completion_tokens=12, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == library_text("Instruction: hello\nResponse:")
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_stream(client):
    stream = client.chat.completions.create(
        model="toy",
        messages=TURNS,
        seed=1,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == library_text("Instruction: hello\nResponse:")
    assert chunks[-1].usage.total_tokens > 0
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_many_at_once(url):
    async def run():
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="secret", max_retries=0
        ) as client:

            async def one(seed):
                stream = await client.completions.create(
                    model="toy", prompt=PROMPT, seed=seed, max_tokens=12, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(32)))

    assert asyncio.run(run()) == [library_text(seed=seed) for seed in range(32)]


def test_errors_are_the_clients_own(client, url):
    with pytest.raises(
        openai.BadRequestError, match="response_format: there is no grammar"
    ) as caught:
        client.chat.completions.create(
            model="toy", messages=TURNS, response_format={"type": "json_object"}
        )
    assert caught.value.param == "response_format"
    with pytest.raises(openai.NotFoundError, match="serves 'toy' and nothing else"):
        client.completions.create(model="gpt-4", prompt="a")
    with (
        pytest.raises(openai.AuthenticationError, match="needs an API key"),
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
    ):
        stranger.models.list()


def running(url):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {
        line.split("{")[0]: float(line.split(" ")[1])
        for line in lines
        if line.startswith(("vllm:num_req", "vllm:request_s"))
    }


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_leaves_is_not_decoded_for(is_stream):
    with live(toy_app(slow_decoder())) as url:
        host, port = url.removeprefix("http://").split(":")
        body = b'{"prompt": "a", "max_tokens": 9000, "ignore_eos": true, "stream": %s}' % (
            b"true" if is_stream else b"false"
        )
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            wait_for(lambda: running(url)["vllm:num_requests_running"] == 1)
        wait_for(lambda: running(url)["vllm:num_requests_running"] == 0)


def wait_for(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
