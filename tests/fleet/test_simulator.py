"""The simulator's fleet against the real one: the same prompts, the same caches, the same policy."""
import json
import os
import random
import re
import subprocess

from fleet import MODEL, cached, call
from test_routers import prefix


def cache_of(worker):
    """Tokens of a block, and blocks."""
    line, = re.findall(r"vllm:cache_config_info\{(.*)\}", call(worker.url + "/metrics"))
    field = lambda name: int(re.search(name + r'="(\d+)"', line)[1])
    return field("block_size"), field("num_gpu_blocks")


def complete(router, prompt):
    """The tokens of the prompt, and the usage. An answer of one token leaves nothing in the cache."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    # Not `return_token_ids`: vllm-router does not look prompts up whose request has it.
    rendered, = json.loads(call(router.workers[0].url + "/v1/completions/render", body))
    return rendered["token_ids"], json.loads(call(router.url + "/v1/completions", body))["usage"]


def simulate(trace, workers, policy, block_tokens, blocks):
    command = [os.environ["KVIST"], "simulate", "-q", "--json", "--trace", trace, "--workers", workers, "--routing", policy,
               "--router-delay", "1ms", "--block-tokens", block_tokens, "--capacity-blocks", blocks,
               "--prefill-rate", 10, "--decode-rate", 1]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_simulator_finds_the_same_tokens(start, tmp_path):
    """Beginnings that return, in caches that hold only some of them. One request at a time, and the router knows all events
    before the next, so nothing depends on timing; in the trace they are ten seconds apart."""
    router = start("vllm-router", "kv_aware", "--context", "1024")
    block_tokens, blocks = cache_of(router.workers[0])
    order = [n for n in range(10) for _ in range(12)]
    random.Random(3).shuffle(order)
    rows, served, prompts = [{"format": "kvist-trace", "version": 1}], 0, 0
    for i, n in enumerate(order):
        prompt = prefix(n, 100 + 10 * n) + f" Question {i}"
        ids, usage = complete(router, prompt)
        router.knows_all()
        assert (len(ids), 1) == (usage["prompt_tokens"], usage["completion_tokens"])
        served, prompts = served + cached(usage), prompts + len(ids)
        rows.append({"id": i, "arrival_ns": i * 10**10, "prompt_tokens": len(ids), "output_tokens": 1,
                     "tokens": ids})
    trace = tmp_path / "load.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = simulate(trace, 3, "prefix_aware", block_tokens, blocks)
    cache = report["cache"]
    assert (report["requests"]["finished"], cache["total_tokens"]) == (len(order), prompts)
    assert cache["evicted_blocks"] > 0 and 0.1 * prompts < served < 0.9 * prompts
    credited = sum(map(int, re.findall(r"credited_prefix_tokens=(\d+)", router.text())))
    print(f"credited {credited} and {report['fleet']['credited_tokens']} tokens")
    print(f"hit tokens of {prompts}: {served} served, {cache['hit_tokens']} simulated")
    assert cache["hit_tokens"] == served
