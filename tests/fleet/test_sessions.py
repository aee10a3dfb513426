"""Sessions through vllm-router: they stick to a worker, and go on without it where the workers share a store."""
import http.client
import json
import math
import random
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet import MODEL, PATIENCE, Worker, call, until
from stores import redis  # noqa: F401
from test_routers import prefix

SESSIONS = "/v1/sessions"
# With a float cache an answer does not depend on whether K and V were loaded or computed.
FLOAT = ("--kv", "f32", "--weights", "f32")


def drawn(n):
    return f"sess-{random.Random(n).getrandbits(128):032x}"


def ask(of, path, body=None, session=None):
    """Status and answer of a worker or a router. 5xx is an answer too."""
    headers = {"x-session-id": session} if session else {}
    try:
        return 200, json.loads(call(of.url + path, body, headers))
    except urllib.error.HTTPError as refused:
        text = refused.read().decode()
        return refused.code, json.loads(text) if text.startswith("{") else text


def insist(of, path, body, session):
    """As clients do: tries again while the router still sends requests to a worker that is gone (5xx)."""
    last = []

    def is_answered():
        last[:] = ask(of, path, body, session)
        return last[0] < 500
    until(f"{path} is answered", is_answered)
    return tuple(last)


def generate(of, session, n_tokens=20):
    body = {"max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    status, answer = insist(of, f"{SESSIONS}/{session}/generate", body, session)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def create(of, session):
    status, answer = insist(of, SESSIONS, {"id": session, "text": prefix(1, 40)}, session)
    assert (status, answer["id"]) == (200, session), answer


def stream(of, session):
    """An answer that has begun and goes on for long."""
    body = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True, "kvist": {"pace": 5}}
    request = urllib.request.Request(f"{of.url}{SESSIONS}/{session}/generate", json.dumps(body).encode(),
                                     {"content-type": "application/json", "x-session-id": session})
    running = urllib.request.urlopen(request, timeout=PATIENCE)
    assert running.readline().startswith(b"data: {")
    return running


def tokens(of, session):
    status, answer = insist(of, f"{SESSIONS}/{session}", None, session)
    return answer["tokens"] if status == 200 else None


def home_of(router):
    """The worker that has served: all others are idle."""
    home, = [worker for worker in router.workers if worker.metric("vllm:request_success_total") > 0]
    return home


def adopted(worker):
    return worker.metric("kvist_shared_sessions_adopted_total")


def test_sessions_stick(start):
    """Sessions live on one worker; `consistent_hash` finds it again by a header, which may be the session's own id."""
    router = start("vllm-router", "consistent_hash")
    for n in range(6):
        own = drawn(n) if n % 2 else None
        header = own or f"name-{n}"
        status, answer = ask(router, SESSIONS, {"text": prefix(1, 20), "id": own}, header)
        assert status == 200 and own in (None, answer["id"]), answer
        for _ in range(4):
            status, said = ask(router, f"{SESSIONS}/{answer['id']}/generate", {"max_tokens": 4}, header)
            assert status == 200 and said["choices"], said


def test_sessions_stick_to_busy_workers(start):
    """`kv_aware` sends requests to the least busy worker, but those of a session to its own."""
    router = start("vllm-router", "kv_aware")
    sessions = [drawn(n) for n in range(20, 23)]
    streams = []
    for session in sessions:
        create(router, session)
        streams.append(stream(router, session))
    homes = [[worker for worker in router.workers if tokens(worker, session)] for session in sessions]
    assert all(len(home) == 1 for home in homes) and len({home[0].url for home in homes}) == 3, homes
    for session in sessions * 3:
        assert tokens(router, session)
    for running in streams:
        running.close()


def test_a_session_outlives_its_worker(start, tmp_path, redis):
    """Its worker is killed in the middle of an answer: another one continues from the last recorded state, with the text that a
    single worker writes. When the first one is back, without memory, it goes on from there."""
    shared = (*FLOAT, "--tier-store", redis.url, "--sessions-shared", "--tier-grace", "10m")
    alone = Worker(tmp_path, None, *FLOAT)
    # Outside the router: shows what the store has.
    watcher = Worker(tmp_path, None, *shared)
    try:
        router = start("vllm-router", "consistent_hash", *shared)
        session = drawn(7)
        create(alone, session)
        expected = [generate(alone, session) for _ in range(4)]
        create(router, session)
        assert [generate(router, session) for _ in range(2)] == expected[:2]
        home = home_of(router)
        before = tokens(home, session)
        until("the last answer is recorded", lambda: tokens(watcher, session) == before)

        running = stream(router, session)
        assert len(tokens(home, session)) > len(before), "it generates"
        home.kill()
        # The client sees that its answer is not whole.
        with pytest.raises(http.client.IncompleteRead) as cut:
            running.read()
        assert b"[DONE]" not in cut.value.partial

        assert generate(router, session) == expected[2]
        next_home, = [worker for worker in router.workers if worker is not home and adopted(worker) > 0]
        assert tokens(next_home, session) == tokens(router, session)
        until("that is recorded", lambda: tokens(watcher, session) == tokens(next_home, session))

        home.start()
        until("the router has taken it back", lambda: tokens(router, session) and adopted(home) > 0)
        assert generate(router, session) == expected[3]
        assert [home.metric(f"kvist_shared_sessions_{name}_total") for name in ("lost", "conflicts")] == [0, 0]
    finally:
        for worker in (alone, watcher):
            worker.kill()


def occupy(worker, seconds):
    """Sends answers that take the worker about so long. Without a pace, which a worker that shuts down does not keep: one answer is timed,
    and as many are sent as that time says. Returns their futures once all of them are accepted."""
    choices = 8
    body = {"model": MODEL, "prompt": prefix(2, 20), "max_tokens": 700, "n": choices, "temperature": 1, "ignore_eos": True}
    answer = lambda: json.loads(call(worker.url + "/v1/completions", body))["choices"]
    began = time.monotonic()
    answer()
    n = math.ceil(seconds / (time.monotonic() - began))
    count = lambda: sum(worker.metric(name) for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total"))
    before = count()
    pool = ThreadPoolExecutor(n)
    answers = [pool.submit(answer) for _ in range(n)]
    until("they are accepted", lambda: count() >= before + n * choices)
    pool.shutdown(wait=False)
    return answers


@pytest.mark.parametrize("policy", ["consistent_hash", "kv_aware"])
def test_a_session_leaves_a_worker_that_shuts_down(start, tmp_path, redis, policy):
    """Its worker gets SIGTERM and still has long answers to end. Once the router has asked it for /ready, no request of the session
    goes there any more: another worker continues it, long before the first one ends."""
    config = tmp_path / "kvist.toml"
    config.write_text(f"[scheduler]\nmax_batch = 8\n[limits]\nmax_queue = 10_000\ngrace_s = {PATIENCE}\n")
    router = start("vllm-router", policy, *FLOAT, "--tier-store", redis.url, "--sessions-shared", "--tier-grace", "10m",
                   "--context", "8192", "--config", str(config))
    session = drawn(9)
    create(router, session)
    generate(router, session)
    home = home_of(router)
    running = occupy(home, 30)
    home.process.send_signal(signal.SIGTERM)
    until("it shuts down", lambda: ask(home, "/ready")[0] == 503)

    body = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    # A router that asks for /health also stops after some errors, but only for a second (`--cb-timeout-duration-secs 1`). Then it tries
    # the worker again, so within four seconds another request would fail.
    answered, since = 0, time.monotonic()
    while answered < 10 or time.monotonic() < since + 4:
        assert home.process.poll() is None, "the router sends requests to a worker that shuts down, until that ends"
        status, answer = ask(router, f"{SESSIONS}/{session}/generate", body, session)
        if status == 200:
            answered += 1
        else:
            assert status >= 500, answer
            answered, since = 0, time.monotonic()
    next_home, = [worker for worker in router.workers if worker is not home and adopted(worker) > 0]
    continued = tokens(next_home, session)
    assert all(len(answer.result()) == 8 for answer in running), "the answers that ran are whole"
    assert home.process.wait(PATIENCE) == 0
    # What the first worker records at its end replaces nothing that came later.
    assert tokens(router, session) == continued


def test_without_a_store_a_lost_session_is_told(start):
    router = start("vllm-router", "consistent_hash")
    session = drawn(8)
    create(router, session)
    generate(router, session)
    home_of(router).kill()
    status, answer = insist(router, f"{SESSIONS}/{session}/generate", {"max_tokens": 4}, session)
    error = answer["error"]
    assert (status, error["code"]) == (404, "session_not_found"), answer
    for words in (session, "in one worker", "--sessions-shared"):
        assert words in error["message"], error
    # The client can begin anew, under the same id.
    create(router, session)
    assert generate(router, session)
