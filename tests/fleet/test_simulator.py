"""The simulator's fleet against the real one: the same prompts, the same caches, the same policy. One request at a time, and the
router knows all events before the next, so nothing depends on timing."""
import json
import os
import random
import re
import subprocess
import urllib.request

from fleet import MODEL, PATIENCE, cached, call, until
from test_routers import prefix


def cache_of(worker):
    """Tokens of a block, and blocks."""
    line, = re.findall(r"vllm:cache_config_info\{(.*)\}", call(worker.url + "/metrics"))
    field = lambda name: int(re.search(name + r'="(\d+)"', line)[1])
    return field("block_size"), field("num_gpu_blocks")


def rendered(router, prompt):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    answer, = json.loads(call(router.workers[0].url + "/v1/completions/render", body))
    return answer["token_ids"]


def complete(router, prompt):
    """The tokens of the prompt, and the usage. An answer of one token leaves nothing in the cache."""
    # Not `return_token_ids`: vllm-router does not look prompts up whose request has it.
    return rendered(router, prompt), router.complete(prompt, max_tokens=1)


def simulate(trace, workers, policy, block_tokens, blocks, prefill_rate=10, decode_rate=1):
    """Rates are tokens per millisecond."""
    command = [os.environ["KVIST"], "simulate", "-q", "--json", "--trace", trace, "--workers", workers, "--routing", policy,
               "--router-delay", "10ms", "--block-tokens", block_tokens, "--capacity-blocks", blocks,
               "--prefill-rate", prefill_rate, "--decode-rate", decode_rate]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Load:
    """What was sent, as a trace: a request every four seconds, each over before the next."""

    def __init__(self):
        self.rows, self.served, self.prompts = [], 0, 0

    def add(self, ids, output_tokens, hit_tokens):
        self.rows.append({"id": len(self.rows), "arrival_ns": len(self.rows) * 4 * 10**9, "prompt_tokens": len(ids),
                          "output_tokens": output_tokens, "tokens": ids})
        self.served, self.prompts = self.served + hit_tokens, self.prompts + len(ids)

    def write(self, path):
        lines = [{"format": "kvist-trace", "version": 1}, *self.rows]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def compare(self, report):
        cache = report["cache"]
        assert (report["requests"]["finished"], cache["total_tokens"]) == (len(self.rows), self.prompts)
        print(f"hit tokens of {self.prompts}: {self.served} served, {cache['hit_tokens']} simulated")
        assert 0.1 * self.prompts < self.served < 0.9 * self.prompts
        assert abs(cache["hit_tokens"] - self.served) <= 0.03 * self.served


def test_caches_that_hold_some_prefixes(start, tmp_path):
    """Beginnings that return, in caches that hold only some of them."""
    router = start("vllm-router", "kv_aware", "--context", "1024")
    order = [n for n in range(10) for _ in range(12)]
    random.Random(3).shuffle(order)
    load = Load()
    for i, n in enumerate(order):
        ids, usage = complete(router, prefix(n, 100 + 10 * n) + f" Question {i}")
        router.knows_all()
        load.add(ids, 1, cached(usage))
    report = simulate(load.write(tmp_path / "load.jsonl"), 3, "prefix_aware", *cache_of(router.workers[0]))
    assert report["cache"]["evicted_blocks"] > 0
    load.compare(report)


def test_loads_that_outweigh_prefixes(start, tmp_path):
    """Long answers occupy one worker after another meanwhile. A prompt leaves the worker that knows its beginning if that is
    too short to make up for the load: the simulated router must decide the same, request by request."""
    router = start("vllm-router", "kv_aware", "--context", "16384")
    order = [n for n in range(12) for _ in range(12)]
    random.Random(4).shuffle(order)
    load, occupied = Load(), []
    for i, n in enumerate(order):
        if i in (36, 72, 108):
            prompt = prefix(1000 + i)
            ids = rendered(router, prompt)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 700, "ignore_eos": True, "stream": True,
                    "kvist": {"pace": 1}}
            request = urllib.request.Request(router.url + "/v1/completions", json.dumps(body).encode(),
                                             {"content-type": "application/json"})
            occupied.append(urllib.request.urlopen(request, timeout=PATIENCE))
            occupied[-1].readline()  # the first token: it is not waited for any more
            router.knows_all()
            load.add(ids, 700, 0)
        # The first questions are as long as the beginning, the last ones a sixth of it.
        question = " ".join(f"{n}-{i}-{word}" for word in range(12))
        ids, usage = complete(router, prefix(n, 10 + 16 * n) + " " + question)
        router.knows_all()
        load.add(ids, 1, cached(usage))
    for answer in occupied:
        answer.close()
    # A long answer counts when it has ended, or its client is known to be gone.
    ended = lambda: [worker.metric("vllm:request_success_total") for worker in router.workers]
    until("all requests end", lambda: sum(ended()) == len(load.rows))
    served = ended()
    assert all(n > 0 for n in served), served
    trace = load.write(tmp_path / "load.jsonl")
    # A token a second, so that the long answers last.
    report = simulate(trace, 3, "prefix_aware", *cache_of(router.workers[0]), decode_rate=0.001)
    assert report["cache"]["evicted_blocks"] == 0
    of_workers = sorted(worker["requests"] for worker in report["fleet"]["list"])
    print(f"requests of workers: {sorted(served)} served, {of_workers} simulated, long answers included")
    # Which worker is the first is arbitrary in both.
    assert of_workers == sorted(served)
    load.compare(report)
