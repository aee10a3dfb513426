"""Keys behind vllm-router: what it passes on of a client's key, and what it calls under its own. docs/fleet.md says what follows."""
import json
import re
import urllib.error
import urllib.request

import pytest
from fleet import MODEL, PATIENCE, Router, Worker, bearer, cached, until
from test_routers import prefix

SESSIONS = "/v1/sessions"
KEYS = {"ann": "ann-secret", "bob": "bob-secret", "router": "router-secret", "operator": "operator-secret"}


@pytest.fixture
def start(tmp_path):
    """A router with a key of its own before a worker with keys, which publishes the prompts of one name."""
    running = []

    def start(policy, published):
        config = tmp_path / "kvist.toml"
        tables = [f'[[keys]]\nname = "{name}"\nkey = "{key}"\nadmin = {"true" if name == "operator" else "false"}\n'
                  for name, key in KEYS.items()]
        config.write_text("".join(tables) + f'[kv_events]\nname = "{published}"\n')
        running.append(Worker(tmp_path, None, "--config", str(config), key=KEYS["operator"]))
        running.append(Router("vllm-router", policy, running[:1], tmp_path, KEYS["router"]))
        return running[-1]

    yield start
    for process in running:
        process.process.kill()
        process.process.wait()


@pytest.fixture
def router(start):
    return start("consistent_hash", "router")


def ask(of, name, path, body=None, method=None):
    """Status and answer. `name` is the key's, or None for a client without one."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **bearer(KEYS.get(name))}
    request = urllib.request.Request(of.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, json.loads(response.read() or "null")
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_completions_are_the_clients_own(router):
    """The client's key arrives, so names share no prefix."""
    body = {"model": MODEL, "prompt": prefix(1), "max_tokens": 1}
    hits = []
    for name in ("ann", "bob", "ann", "bob"):
        status, answer = ask(router, name, "/v1/completions", body)
        assert status == 200, answer
        hits.append(cached(answer["usage"]) > 0)
    assert hits == [False, False, True, True]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for path, of_path in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        assert [ask(router, name, path, of_path)[0] for name in ("ann", None)] == [200, 401], path


def test_events_are_those_of_one_name(start):
    """The router finds the prefixes of the name whose prompts are published, sent with keys of that name; and no others."""
    router = start("kv_aware", "ann")
    credits = {}
    for n, name in enumerate(("ann", "bob")):
        body = {"model": MODEL, "prompt": prefix(10 + n), "max_tokens": 1}
        for _ in range(2):
            at = len(router.text())
            status, answer = ask(router, name, "/v1/completions", body)
            assert status == 200, answer
            # The first message says that the cache is empty; bob's prompts add none.
            worker, = router.workers
            until("it is published", lambda: worker.metric("kvist_kv_event_messages_total") > 1)
            router.knows_all()
        credits[name] = int(re.findall(r"credited_prefix_tokens=(\d+)", router.text()[at:] + " credited_prefix_tokens=0")[0])
        assert cached(answer["usage"]) > 0
    assert credits["ann"] >= 100 and credits["bob"] == 0, credits


def test_sessions_are_the_routers(router):
    """The router's key arrives, whatever the client's is: all clients have the same sessions, also those without a key."""
    status, made = ask(router, "ann", SESSIONS, {"text": prefix(2, 20)})
    assert status == 200, made
    path = f"{SESSIONS}/{made['id']}"
    for name in ("bob", None):
        status, listed = ask(router, name, SESSIONS)
        assert (status, [session["id"] for session in listed["data"]]) == (200, [made["id"]])
        assert ask(router, name, path)[1]["tokens"]
        assert ask(router, name, path + "/generate", {"max_tokens": 2})[0] == 200
    # On the worker they are the router's alone.
    worker, = router.workers
    assert ask(worker, "router", path)[0] == 200 and ask(worker, "ann", path)[0] == 404
    assert ask(worker, None, SESSIONS)[0] == 401
    assert ask(router, "bob", path, method="DELETE")[0] == 200
    assert ask(router, "ann", path)[0] == 404


def test_other_paths_are_the_routers(router):
    """So is every path that the router does not know. With a key that is no admin's it may forget the router's own prompts, and nothing more."""
    assert ask(router, None, "/v1/cache", method="DELETE")[0] == 200
    assert ask(router, None, "/v1/cache", {"tokens": 1024})[0] == 403
