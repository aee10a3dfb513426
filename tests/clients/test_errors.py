"""Errors arrive as the classes that the official client has for them; the request of a client that leaves uses nothing."""
import asyncio
import time

import openai
import pytest
from conftest import client_of

NAME = "tiny-rust-7m"
# A token a second, so that no text ends by itself. The pace is kept while every request has one.
ENDLESS = {"ignore_eos": True, "kvist": {"pace": 1}}


def test_classes(client):
    table = [
        (dict(model="gpt-5"), openai.NotFoundError, "model", "model_not_found"),
        (dict(temperature=3), openai.BadRequestError, "temperature", "invalid_value"),
        (dict(max_tokens=0), openai.BadRequestError, "max_tokens", "invalid_value"),
        (dict(n=100_000), openai.BadRequestError, "n", "invalid_value"),
        (dict(prompt="word " * 2000), openai.BadRequestError, "prompt", "context_length_exceeded"),
        (dict(suffix="}"), openai.BadRequestError, "suffix", "unsupported_parameter"),
        (dict(extra_body={"temprature": 1}), openai.BadRequestError, "temprature", "unknown_parameter"),
        (dict(prompt="word " * (1 << 20)), openai.APIStatusError, None, "body_too_large"),
    ]
    for fields, kind, param, code in table:
        with pytest.raises(kind) as refused:
            client.completions.create(**{"model": NAME, "prompt": "fn", "max_tokens": 1, **fields})
        error = refused.value
        assert (error.param, error.code) == (param, code), f"{fields}: {error}"
        assert error.body["message"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model=NAME, input="a")
    assert unknown.value.code == "unknown_url"


def test_keys(keyed):
    for key in ["wrong-secret", "ann-secre"]:
        with pytest.raises(openai.AuthenticationError) as refused:
            client_of(keyed, key).models.list()
        assert refused.value.code == "invalid_api_key"
    assert client_of(keyed, "ann-secret").models.list().data
    with pytest.raises(openai.PermissionDeniedError):
        client_of(keyed, "ann-secret").get("/metrics".replace("/", keyed.url + "/", 1), cast_to=object)
    # What one name has cached the other does not find.
    prompt = "A prompt of two names. " * 10
    cached = [
        client_of(keyed, key).completions.create(model=NAME, prompt=prompt, max_tokens=1)
        .usage.prompt_tokens_details.cached_tokens
        for key in ["ann-secret", "ops-secret", "ann-secret"]
    ]
    assert cached[0] == cached[1] == 0 < cached[2], cached


def busy(server, key):
    return server.metric("vllm:num_requests_running", key) + server.metric("vllm:num_requests_waiting", key)


def until(is_true, server, key=None):
    deadline = time.monotonic() + 600  # a safety net
    while not is_true():
        assert time.monotonic() < deadline, server.get("/metrics", key)[1]
        time.sleep(0.05)


def becomes_free(server, key=None):
    until(lambda: not busy(server, key) and not server.metric("kvist_cells_held", key), server, key)


def test_a_full_queue_is_429(keyed):
    client = client_of(keyed, "ann-secret")
    # One runs, one waits: both are let go of unread.
    streams, refused = [], None
    for _ in range(8):
        try:
            streams.append(client.completions.create(
                model=NAME, prompt="fn main() {", max_tokens=900, stream=True, extra_body=ENDLESS))
        except openai.RateLimitError as error:
            refused = error
            break
    assert refused is not None, f"{len(streams)} requests were taken, room is for 2"
    assert refused.code == "queue_full"
    assert int(refused.response.headers["retry-after"]) >= 1
    # The official client's own retries get through once there is room.
    streams.pop().close()
    for stream in streams:
        stream.close()
    # Each waits for a second, as the server says. A busy machine takes longer to notice that the clients are gone.
    patient = openai.OpenAI(base_url=keyed.url + "/v1", api_key="ann-secret", max_retries=60)
    assert patient.completions.create(model=NAME, prompt="fn", max_tokens=1).choices
    becomes_free(keyed, "ops-secret")


def test_a_deadline_is_not_asked_again(keyed):
    sent = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    patient = openai.OpenAI(base_url=keyed.url + "/v1", api_key="ann-secret", max_retries=5, http_client=http)
    running = client_of(keyed, "ann-secret").completions.create(
        model=NAME, prompt="fn main() {", max_tokens=900, stream=True, extra_body=ENDLESS)
    next(iter(running))
    with pytest.raises(openai.APIStatusError) as refused:
        patient.completions.create(model=NAME, prompt="fn", extra_body={"kvist": {"timeout_ms": 50, "pace": 1}})
    running.close()
    assert refused.value.status_code == 408 and refused.value.code == "deadline_exceeded"
    assert len(sent) == 1, f"{len(sent)} requests"
    becomes_free(keyed, "ops-secret")


def test_a_client_that_leaves_holds_nothing(plain, client):
    generated = plain.metric("vllm:generation_tokens_total")
    streams = [
        client.completions.create(model=NAME, prompt="fn main() {", max_tokens=1000, stream=True,
                                  extra_body=ENDLESS)
        for _ in range(8)
    ]
    for stream in streams:
        next(iter(stream))
        stream.close()
    becomes_free(plain)
    assert plain.metric("vllm:generation_tokens_total") - generated < 8 * 1000


def test_the_async_client(plain):
    async def run():
        async with openai.AsyncOpenAI(base_url=plain.url + "/v1", api_key="none", max_retries=0) as client:
            async def one(i):
                fields = dict(model=NAME, prompt=f"Chapter {i}.", max_tokens=16, temperature=0)
                stream = await client.completions.create(stream=True, **fields)
                streamed = "".join([chunk.choices[0].text async for chunk in stream])
                whole = await client.completions.create(**fields)
                return streamed, whole.choices[0].text
            return await asyncio.gather(*(one(i) for i in range(16)))
    assert all(streamed and streamed == whole for streamed, whole in asyncio.run(run()))


def test_a_cancelled_task_holds_nothing(plain):
    async def run():
        async with openai.AsyncOpenAI(base_url=plain.url + "/v1", api_key="none", max_retries=0) as client:
            async def endless():
                await client.completions.create(model=NAME, prompt="fn main() {", max_tokens=1000,
                                                extra_body=ENDLESS)
            tasks = [asyncio.create_task(endless()) for _ in range(4)]
            await asyncio.to_thread(until, lambda: busy(plain, None) == 4, plain)
            for task in tasks:
                task.cancel()
            assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))

    ended = plain.metric("vllm:request_success_total")
    asyncio.run(run())
    becomes_free(plain)
    # All four ran, and each is counted as aborted.
    until(lambda: plain.metric("vllm:request_success_total") - ended == 4, plain)


def test_a_deadline_in_a_stream_is_an_error(client):
    reasons = []
    # On a busy machine no token comes within the first; at this pace no machine is done before the last.
    for timeout_ms in (100, 1000, 10000, 100000):
        stream = client.completions.create(
            model=NAME, prompt="fn main() {", max_tokens=1000, stream=True,
            extra_body={"ignore_eos": True, "kvist": {"timeout_ms": timeout_ms, "pace": 1}})
        with pytest.raises(openai.APIError) as refused:
            for chunk in stream:
                reasons.append(chunk.choices[0].finish_reason)
        if reasons:
            break
    assert reasons[-1] == "length" and refused.value.code == "deadline_exceeded"
