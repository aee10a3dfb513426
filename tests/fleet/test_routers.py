"""What a fleet promises its users, through each router, without anything between router and workers."""
import itertools
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from fleet import MODEL, PATIENCE, Router, Worker, cached, call, until
from stores import STRICT, missing

WORDS = "trait vector slice borrow owner lifetime macro crate module closure iterator string match enum struct".split()


def prefix(n, words=150):
    chosen = random.Random(n)
    return f"Group {n}. " + " ".join(chosen.choice(WORDS) for _ in range(words))


def until_it_serves(router, worker):
    """Sends prompts that no worker knows, several at a time, until `worker` gets one."""
    others = iter(range(100, 10_000))

    def serves():
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: router.complete(prefix(next(others))), range(8)))
        return worker.metric("vllm:request_success_total") > 0
    until(f"{worker.url} serves", serves)


@pytest.mark.parametrize("chat", [False, True])
def test_a_prefix_is_computed_once(router, chat):
    run = router.chat if chat else router.complete
    groups = [prefix(n) for n in range(6)]
    home, first = {}, []
    for n, text in enumerate(groups):
        home[n], usage = router.which(lambda: run(text + " First question"))
        first.append(usage)
        router.knows_all()
    order = [n for n in range(6) for _ in range(4)]
    random.Random(1).shuffle(order)
    hits = 0
    for i, n in enumerate(order):
        worker, usage = router.which(lambda: run(groups[n] + f" Question {i}"))
        assert worker is home[n], f"group {n} moved"
        # All but the block in which the question begins, or which a merged token changes.
        assert cached(usage) >= 16 * ((first[n]["prompt_tokens"] - 20) // 16)
        hits += cached(usage)
    hits += sum(cached(usage) for usage in first)
    counted = sum(worker.metric("vllm:prefix_cache_hits_total") for worker in router.workers)
    assert hits == counted, "the caches count what clients are told"


def test_eviction_is_exact(start):
    """Caches that hold a few of the prefixes: what the router credits is what the worker finds, at every request."""
    router = start("vllm-router", "kv_aware", "--context", "1024")
    order = [n for n in range(8) for _ in range(5)]
    random.Random(2).shuffle(order)
    assert is_exact(router, order) > 0
    assert sum(worker.metric("kvist_blocks_evicted_total") for worker in router.workers) > 0


def is_exact(router, numbers):
    """What the router credits is what the worker finds, for each of these prefixes. Returns the sum."""
    found = 0
    for n in numbers:
        at = len(router.text())
        _, usage = router.which(lambda: router.complete(prefix(n)))
        router.knows_all()
        lines = re.findall(r"credited_prefix_tokens=(\d+)", router.text()[at:])
        credit = int(lines[-1]) if lines else 0
        # A prompt's last token is always computed, so the last whole block may be credited and not used.
        whole = (usage["prompt_tokens"] - 1) // 16 * 16
        assert min(credit, whole) == cached(usage), f"group {n}: {lines}"
        found += cached(usage)
    return found


def until_it_listens(router):
    """The workers publish something, until the router has heard each of them and so sees what it has missed."""
    more = itertools.count(1000)

    def hears():
        lasts = []
        for worker in router.workers:
            worker.complete(prefix(next(more)))
            lasts.append(worker.metric("kvist_kv_event_messages_total") - 1)
        return all(router.seen(worker) >= last for worker, last in zip(router.workers, lasts))
    until("the router hears every worker", hears)
    router.knows_all()


def test_a_restarted_publisher_is_begun_anew(start):
    """A worker comes back at the same address, with an empty cache: what it had is credited no more, and what it computes now is."""
    router = start("vllm-router", "kv_aware")
    home = {}
    for n in range(9):
        home[n], _ = router.which(lambda: router.complete(prefix(n)))
        router.knows_all()
    assert is_exact(router, range(9)) > 0
    again = home[0]
    lost = [n for n in home if home[n] is again]
    router.restart(again)
    until_it_listens(router)
    at = len(router.text())
    assert is_exact(router, lost) == 0, "nobody has them"
    credits = {int(credit) for credit in re.findall(r"credited_prefix_tokens=(\d+)", router.text()[at:])}
    assert credits <= {0}, credits
    assert is_exact(router, range(9)) > 0


# Messages that a worker keeps for replays.
BUFFER = 8


@pytest.fixture
def few_messages(tmp_path):
    config = tmp_path / "kvist.toml"
    config.write_text(f"[kv_events]\nbuffer = {BUFFER}\n")
    return ["--config", str(config)]


def test_a_router_that_starts_late_learns_everything(tmp_path, few_messages):
    """The first messages have left the buffer before the router is there."""
    workers = [Worker(tmp_path, None, *few_messages) for _ in range(3)]
    router = None
    try:
        for n in range(36):
            workers[n % 3].complete(prefix(n))
        assert all(worker.metric("kvist_kv_event_messages_total") > BUFFER for worker in workers)
        router = Router("vllm-router", "kv_aware", workers, tmp_path)
        until_it_listens(router)
        assert is_exact(router, range(36)) >= 36 * 100, "every prompt is found where it is"
    finally:
        for process in [*workers, *([router] if router else [])]:
            process.process.kill()
            process.process.wait()


def test_a_router_that_was_cut_off_learns_what_it_missed(start, few_messages):
    """It hears nothing while it is stopped, and its connections are cut, so that nothing waits for it in the system's buffers."""
    router = start("vllm-router", "kv_aware", *few_messages)
    for n in range(6):
        router.complete(prefix(n))
        router.knows_all()
    before = [worker.metric("kvist_kv_event_messages_total") for worker in router.workers]
    router.process.send_signal(signal.SIGSTOP)
    try:
        for n in range(10, 46):
            router.workers[n % 3].complete(prefix(n))
        for worker in router.workers:
            cut = subprocess.run(["ss", "--kill", "--no-header", "state", "established", f"sport = :{worker.events}"],
                                 capture_output=True, text=True) if shutil.which("ss") else None
            if not cut or cut.returncode or not cut.stdout.strip():
                missing("connections cannot be cut here (ss --kill, as root)", STRICT)
    finally:
        router.process.send_signal(signal.SIGCONT)
    for worker, n in zip(router.workers, before):
        assert worker.metric("kvist_kv_event_messages_total") > n + BUFFER
    until_it_listens(router)
    assert is_exact(router, range(10, 46)) >= 36 * 100


def test_a_tier_is_weighed(start):
    """With `--kv-events-tiers`: what the cache has evicted and the tier in RAM has is credited at vllm-router's 0.8, and is found."""
    router = start("vllm-router", "kv_aware", "--context", "1024", "--kv-events-tiers", "--tier-ram", "256MiB",
                   "--tier-load", "always", "--tier-grace", "60s")
    home = {}

    def ask(n):
        worker, usage = router.which(lambda: router.complete(prefix(n)))
        # A copy to the tier may come after the answer.
        until("it is copied", lambda: worker.metric("kvist_tier_store_bytes") == 0)
        return worker, usage

    for n in range(12):
        home[n], _ = ask(n)
        router.knows_all()
    weighed = 0
    for n in range(12):
        # Another prompt's event comes after all of the tiers.
        ask(100 + n)
        router.knows_all()
        at = len(router.text())
        worker, usage = ask(n)
        credit = int(re.findall(r"credited_prefix_tokens=(\d+)", router.text()[at:])[-1])
        whole = (usage["prompt_tokens"] - 1) // 16 * 16
        assert worker is home[n] and cached(usage) == whole
        # The last whole block may be credited and not used, as above.
        assert whole * 4 // 5 <= credit <= whole + 16, f"group {n}: {credit} of {whole}"
        weighed += credit < whole
    assert weighed > 0 and sum(worker.metric("kvist_blocks_evicted_total") for worker in router.workers) > 0


class Load:
    """Clients that ask one question after the other, until the block ends. No answer may fail."""

    def __init__(self, router, n_clients=3):
        self.router, self.n_clients = router, n_clients
        self.numbers, self.answered, self.ends = itertools.count(), [], threading.Event()

    def client(self):
        while not self.ends.is_set():
            n = next(self.numbers)
            # Prefixes that return, and now and then one that no worker knows.
            text = prefix(n % 6) if n % 4 else prefix(1000 + n)
            assert self.router.complete(text + f" Question {n}")["completion_tokens"] > 0
            self.answered.append(n)

    def goes_on(self, n_answers=12):
        """Waits for more answers."""
        before = len(self.answered)

        def has_gone_on():
            assert not any(client.done() for client in self.clients), [client.exception() for client in self.clients]
            return len(self.answered) >= before + n_answers
        until("the load goes on", has_gone_on)

    def __enter__(self):
        self.pool = ThreadPoolExecutor(self.n_clients)
        self.clients = [self.pool.submit(self.client) for _ in range(self.n_clients)]
        self.goes_on()
        return self

    def __exit__(self, *failed):
        self.ends.set()
        self.pool.shutdown()
        if failed == (None, None, None):
            for client in self.clients:
                client.result()


def test_workers_come_and_go_under_load(start, tmp_path, kind):
    """One shuts down, one is killed, both come back, one joins: during one load, of which every request is answered."""
    config = tmp_path / "kvist.toml"
    config.write_text(f"[limits]\ngrace_s = {PATIENCE}\n")
    router = start(kind, None, "--config", str(config))
    # It takes twenty seconds while its worker has nothing else to do.
    body = {"model": MODEL, "prompt": prefix(0), "max_tokens": 60, "ignore_eos": True, "stream": True, "kvist": {"pace": 3}}
    request = urllib.request.Request(router.url + "/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    stream = urllib.request.urlopen(request, timeout=PATIENCE)
    assert stream.readline().startswith(b"data: {")
    running = lambda: [worker for worker in router.workers if worker.metric("vllm:num_requests_running") == 1]
    until("a worker runs it", running)
    leaving, = running()
    killed = next(worker for worker in router.workers if worker is not leaving)
    joined = None
    try:
        with Load(router) as load:
            leaving.process.send_signal(signal.SIGTERM)

            def is_draining():
                try:
                    return not call(leaving.url + "/ready")
                except urllib.error.HTTPError as refused:
                    return refused.code == 503
                except urllib.error.URLError:
                    return True  # it has answered everything, and is gone
            until("it says that it shuts down, or is gone", is_draining)
            load.goes_on()
            killed.kill()
            load.goes_on()
            joined = Worker(tmp_path)
            if kind == "smg":
                call(router.url + "/workers", {"url": joined.url})
            else:
                call(router.url + f"/add_worker?url={joined.url}", {})
            until_it_serves(router, joined)
            load.goes_on()
            # An answer that may have run when its worker was told to shut down is whole.
            rest = stream.read().decode()
            assert rest.count('"text"') >= 59 and '"finish_reason":"length"' in rest and "[DONE]" in rest
            assert leaving.process.wait(PATIENCE) == 0
            for worker in (leaving, killed):
                worker.start()
                until_it_serves(router, worker)
            load.goes_on()
    finally:
        if joined:
            joined.kill()


def test_a_client_hangs_up(router):
    body = json.dumps({"model": MODEL, "prompt": prefix(1), "max_tokens": 700, "ignore_eos": True, "stream": True,
                       "kvist": {"pace": 1}}).encode()
    client = socket.create_connection(("127.0.0.1", router.port))
    client.settimeout(PATIENCE)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                   b"content-length: %d\r\n\r\n" % len(body) + body)
    received = b""
    while b"data: {" not in received:
        received += (chunk := client.recv(4096))
        assert chunk, received
    running = lambda: sum(worker.metric("vllm:num_requests_running") for worker in router.workers)
    until("a worker computes", lambda: running() == 1)
    client.close()
    # Its answer would take twelve minutes.
    until("no worker computes for it", lambda: running() == 0)


def test_openai_client(router):
    client = openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is a trait?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    schema = {"type": "object", "properties": {"answer": {"type": "boolean"}}, "required": ["answer"],
              "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    strict = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0,
                                            response_format=response_format)
    assert isinstance(json.loads(strict.choices[0].message.content)["answer"], bool)
