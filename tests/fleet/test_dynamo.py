"""NVIDIA Dynamo's indexer, of its crate `dynamo-kv-router`, hears three `kvist serve` over ZeroMQ: what it credits is what they find."""
import json
import random
import subprocess
import time
from pathlib import Path

import pytest
from fleet import MODEL, Worker, cached, call, until
from test_routers import prefix
from test_simulator import cache_of

PEER = Path(__file__).parent / "dynamo"
CARGO = ["cargo", "{}", "--quiet", "--locked", "--manifest-path", str(PEER / "Cargo.toml")]


def cargo(command):
    return [word.format(command) for word in CARGO]


class Indexer:
    """Dynamo's standalone indexer. Workers have numbers."""

    def __init__(self):
        self.process = subprocess.Popen(cargo("run"), stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line.startswith("serving "), "Dynamo's indexer has not started"
        self.url = line.split()[1]
        self.markers = iter(range(10_000, 20_000))

    def register(self, number, worker):
        source = json.loads(call(worker.url + "/kv_event_sources"))["0"]
        call(self.url + "/register", {
            "instance_id": number, "model_name": MODEL, "block_size": cache_of(worker)[0], "dp_rank": 0,
            "endpoint": source["endpoint"], "replay_endpoint": source["replay_endpoint"]})

    def unregister(self, number):
        call(self.url + "/unregister", {"instance_id": number, "model_name": MODEL})

    def query(self, tokens):
        return json.loads(call(self.url + "/query", {"model_name": MODEL, "token_ids": tokens}))

    def scores(self, tokens):
        """Tokens that it credits to caches, by worker."""
        return {int(worker): ranks["0"] for worker, ranks in self.query(tokens)["scores"].items()}

    def with_tiers(self, tokens):
        """Tokens that it credits to the first worker: to its cache, and to cache and tier in RAM together."""
        credit = self.query(tokens)["instances"].get("0", {"gpu": 0, "cpu": 0})
        return credit["gpu"], credit["cpu"]

    def knows_all(self, number, worker):
        """Waits until it has applied all that `worker` has published: a prompt of its own is the last of it."""
        def knows_another():
            tokens, _ = complete(worker, prefix(next(self.markers), 12))
            whole = len(tokens) // 16 * 16
            for _ in range(40):
                if self.scores(tokens).get(number, 0) == whole > 0:
                    return True
                time.sleep(0.05)
            # Its subscription was not there yet. It asks for what it has missed when it hears the next message.
            return False
        until("Dynamo knows the last prompt", knows_another)


@pytest.fixture
def indexers():
    running = []

    def start():
        running.append(Indexer())
        return running[-1]

    yield start
    for indexer in running:
        indexer.process.kill()
        indexer.process.wait()


@pytest.fixture
def workers(tmp_path):
    # So few messages are kept that an indexer which comes late learns most from the content in their place.
    config = tmp_path / "kvist.toml"
    config.write_text("[kv_events]\nbuffer = 8\n")
    running = [Worker(tmp_path, None, "--context", "1024", "--config", str(config)) for _ in range(3)]
    yield running
    for worker in running:
        worker.kill()


def complete(worker, prompt, **more):
    """The tokens of the prompt, and the usage."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    rendered, = json.loads(call(worker.url + "/v1/completions/render", body))
    return rendered["token_ids"], json.loads(call(worker.url + "/v1/completions", body))["usage"]


def random_prompt(chosen):
    """Beginnings that return, of any length, and a question."""
    words = prefix(chosen.randrange(8), 200).split()
    return " ".join(words[:chosen.randrange(20, 200)]) + f" Question {chosen.randrange(4)}"


def compare(indexer, workers, chosen, n_prompts):
    """What it credits is what the worker reuses, at every prompt. Returns the tokens."""
    found = 0
    for i in range(n_prompts):
        number = chosen.randrange(len(workers))
        worker, prompt = workers[number], random_prompt(chosen)
        indexer.knows_all(number, worker)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        rendered, = json.loads(call(worker.url + "/v1/completions/render", body))
        credit = indexer.scores(rendered["token_ids"]).get(number, 0)
        _, usage = complete(worker, prompt)
        # A prompt's last token is always computed, so the last whole block may be credited and not used.
        whole = (usage["prompt_tokens"] - 1) // 16 * 16
        assert min(credit, whole) == cached(usage), f"prompt {i}, worker {number}"
        found += cached(usage)
    return found


def test_decoder():
    """Random events, encoded by kvist's encoder, through Dynamo's decoder: dynamo/tests/decoder.rs."""
    subprocess.run(cargo("test") + ["--test", "decoder"], check=True)


def test_it_credits_what_workers_find(indexers, workers):
    chosen, indexer = random.Random(5), indexers()
    for number, worker in enumerate(workers):
        indexer.register(number, worker)
    assert compare(indexer, workers, chosen, 90) > 0
    assert all(worker.metric("kvist_blocks_evicted_total") > 0 for worker in workers)

    # A salt's blocks are its own affair.
    tokens, _ = complete(workers[0], prefix(1000, 40), cache_salt="secret")
    indexer.knows_all(0, workers[0])
    assert indexer.scores(tokens) == {}

    # One that comes late knows the same.
    late = indexers()
    for number, worker in enumerate(workers):
        late.register(number, worker)
    assert compare(late, workers, chosen, 30) > 0


def test_a_worker_restarts(indexers, workers):
    chosen, indexer = random.Random(6), indexers()
    for number, worker in enumerate(workers):
        indexer.register(number, worker)
    prompts = [random_prompt(chosen) for _ in range(6)]
    for number, worker in enumerate(workers):
        for prompt in prompts:
            tokens, _ = complete(worker, prompt)
        indexer.knows_all(number, worker)
    assert set(indexer.scores(tokens)) == {0, 1, 2}

    # As Dynamo's own workers do it: a process that has ended is unregistered, and its successor registers itself.
    workers[1].kill()
    indexer.unregister(1)
    assert set(indexer.scores(tokens)) == {0, 2}
    workers[1].start()
    indexer.register(1, workers[1])
    indexer.knows_all(1, workers[1])
    assert set(indexer.scores(tokens)) == {0, 2}, "its cache is empty"
    for _ in range(3):
        complete(workers[1], prompts[-1])
    indexer.knows_all(1, workers[1])
    assert set(indexer.scores(tokens)) == {0, 1, 2}
    assert compare(indexer, workers, chosen, 30) > 0


def test_it_knows_what_a_tier_has(indexers, tmp_path):
    """With `--kv-events-tiers`: blocks that the cache has evicted and the tier in RAM has."""
    worker = Worker(tmp_path, None, "--context", "1024", "--kv-events-tiers", "--tier-ram", "256MiB", "--tier-load", "always",
                    "--tier-grace", "60s")
    try:
        indexer = indexers()
        indexer.register(0, worker)
        prompts = [prefix(n) for n in range(10)]
        all_tokens = [complete(worker, prompt)[0] for prompt in prompts]
        late = indexers()
        late.register(0, worker)
        indexer.knows_all(0, worker)
        late.knows_all(0, worker)
        # A tier's copies may come after the answer.
        whole = [len(tokens) // 16 * 16 for tokens in all_tokens]
        for one in (indexer, late):
            until("Dynamo knows the tier", lambda: [one.with_tiers(tokens)[1] for tokens in all_tokens] == whole)
        assert any(indexer.with_tiers(tokens)[0] == 0 for tokens in all_tokens), "the cache has evicted some"
        for prompt, expected in zip(prompts, whole):
            _, usage = complete(worker, prompt)
            assert cached(usage) == min(expected, (usage["prompt_tokens"] - 1) // 16 * 16)
    finally:
        worker.kill()
