#!/usr/bin/env python3
"""`kvist serve` beside vLLM's own server on CPU, both over OpenAI's chat API with one W8A8 model, driven by aiperf in turns:

    bench/rivals/engines/install.sh && bench/rivals/engines/serving.py [--rounds 3] [--json FILE] > FILE.md

Users arrive in the first seconds (--ramp), and send the next turn as soon as the last is answered. A conversation has a system prompt
that others share, and 2 to 4 turns; lengths are drawn from the seed. Every request is a line of a file that both servers get byte for
byte, with an answer of a fixed length (`ignore_eos`); the answers in a conversation's history are fixed text as well, so a server
computes those again. Each round has other texts, so that nothing is cached from the round before. Both have 2 threads, 16-bit K and V in
a cache of the same size, prefix caching, and the same chat template. The server that waits is stopped (SIGSTOP), because an idle vLLM
spins.

A run's figures are aiperf's: output tokens per second from the first request to the end of the last, time to first token (TTFT), and
time per output token after it (TPOT, a mean per request). Runs in which a request fails, or has another length, are reported as failed.
"""
import argparse
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import common  # noqa: E402
from common import ENGINES, Failed  # noqa: E402


def span(text):
    """`64-256`, or `64` for always the same."""
    low, _, high = text.partition("-")
    found = (int(low), int(high or low))
    if not 0 < found[0] <= found[1]:
        raise ValueError(text)
    return found


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--kvist", default=common.ROOT / "target/release/kvist")
parser.add_argument("--model", type=pathlib.Path, help="a Hugging Face folder that both can read [default: random, 1.1B, W8A8]")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--users", type=int, default=32)
parser.add_argument("--conversations", type=int, default=64)
parser.add_argument("--ramp", type=float, default=20, help="seconds in which the users arrive")
parser.add_argument("--systems", type=int, default=4, help="different system prompts")
parser.add_argument("--system-tokens", type=int, default=512)
parser.add_argument("--user-tokens", type=span, default="64-256")
parser.add_argument("--output-tokens", type=span, default="64-128")
parser.add_argument("--turns", type=span, default="2-4")
parser.add_argument("--temperature", type=float, default=0.0)
parser.add_argument("--step-tokens", type=int, default=512, help="most tokens of a step, of both")
parser.add_argument("--cache-gib", type=int, default=2, help="K and V, of both")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--only", default="kvist,vLLM", help="one of the two alone")
parser.add_argument("--kvist-args", default="", help="more arguments of `kvist serve`")
parser.add_argument("--vllm-args", default="", help="more arguments of vLLM's server")
parser.add_argument("--timeout", type=float, default=900, help="seconds that a server has to start, and a run")
parser.add_argument("--json", type=pathlib.Path, help="every single figure into this file")
args = parser.parse_args()
if args.users > args.conversations:
    parser.error(f"--users {args.users}: as many --conversations at least")
if set(args.only.split(",")) - {"kvist", "vLLM"}:
    parser.error(f"--only {args.only}: these are kvist and vLLM")

WORK = ENGINES / "serving"
NAME = "model"
# Both servers render conversations by this template: `<s>` and a line per message. The models of random weights have none.
TEMPLATE = ("{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")
FIGURES = {  # ours: (aiperf's name, statistic, is more better?)
    "output tokens/s": ("output_token_throughput", "avg", True),
    "TTFT p50, ms": ("time_to_first_token", "p50", False),
    "TTFT p90, ms": ("time_to_first_token", "p90", False),
    "TPOT p50, ms": ("inter_token_latency", "p50", False),
    "TPOT p90, ms": ("inter_token_latency", "p90", False),
}


def folder():
    """The model, with a tokenizer configuration that names the template."""
    model = args.model or common.model("int8", args.kvist)
    made = WORK / "model"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for file in model.resolve().iterdir():
        if file.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (made / file.name).symlink_to(file)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config["chat_template"] = TEMPLATE
    (made / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return made


def text(draw, tokens):
    """Made-up words. The tokenizer of the random models has a token per byte; with another one these are fewer tokens."""
    words = ""
    while len(words) < tokens:
        words += "".join(draw.choice("abdefgiklmnoprsuvz") for _ in range(draw.randint(2, 8))) + " "
    return words[:tokens - 1] + "."


def load(where, seed, conversations):
    """Writes a file for each conversation, a line for each turn; returns how many requests there are, and tokens of their answers."""
    draw = random.Random(seed)
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    systems = [text(draw, args.system_tokens) for _ in range(args.systems)]
    requests = tokens = 0
    for number in range(conversations):
        messages, lines = [{"role": "system", "content": systems[number % len(systems)]}], []
        for _ in range(draw.randint(*args.turns)):
            answer = draw.randint(*args.output_tokens)
            messages.append({"role": "user", "content": text(draw, draw.randint(*args.user_tokens))})
            lines.append(json.dumps({"model": NAME, "messages": messages, "max_tokens": answer, "temperature": args.temperature,
                                     "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}))
            messages.append({"role": "assistant", "content": text(draw, answer)})
            requests, tokens = requests + 1, tokens + answer
        (where / f"{number:04}.jsonl").write_text("\n".join(lines) + "\n")
    return requests, tokens


class Server(common.Server):
    """A server that is stopped while it is not measured."""

    def __init__(self, name, command, env, log):
        self.port = common.free_port()
        super().__init__(name, [*command, "--host", "127.0.0.1", "--port", self.port], self.port, args.timeout, log=log, env=env)
        self.signal(signal.SIGSTOP)

    def prompt_tokens(self, line):
        """What the server counts for a request. The request also warms the server up."""
        body = json.loads(line) | {"max_tokens": 8, "stream": False}
        del body["stream_options"]
        return self.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]


def kvist(model):
    cells = args.cache_gib << 30
    config = json.loads((model / "config.json").read_text())
    heads = config["num_key_value_heads"] * config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    tokens = cells // (config["num_hidden_layers"] * 2 * heads * 2) // 64 * 64  # two bytes each
    command = [args.kvist, "serve", "-m", model, "--name", NAME, "--threads", args.threads, "--kv", "bf16", "--context", tokens,
               "--fast-prefill", "--max-batch", args.users, "--max-batch-tokens", args.step_tokens, *args.kvist_args.split()]
    return Server("kvist", command, {}, WORK / "kvist.log")


def vllm(model):
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(WORK / "cache"),
           "VLLM_CPU_KVCACHE_SPACE": str(args.cache_gib), "OMP_NUM_THREADS": str(args.threads),
           "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}"}
    # `vllm serve` looks for a package named vllm, which vllm-cpu is not; this module is what it runs.
    command = [common.python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME,
               "--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", args.users, "--max-num-batched-tokens", args.step_tokens,
               "--enable-prefix-caching", "--disable-uvicorn-access-log", *args.vllm_args.split()]
    return Server("vLLM", command, env, WORK / "vllm.log")


def drive(server, model, requests, expected, tokens):
    """One run of aiperf."""
    out = WORK / f"aiperf-{server.name}"
    shutil.rmtree(out, ignore_errors=True)
    conversations = len(list(requests.glob("*.jsonl")))
    command = [ENGINES / "aiperf/bin/aiperf", "profile", "--url", f"http://127.0.0.1:{server.port}", "--model", NAME,
               "--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--tokenizer", model,
               "--input-file", requests, "--custom-dataset-type", "raw-payload", "--dataset-sampling-strategy", "sequential",
               "--num-conversations", conversations, "--concurrency", args.users, "--random-seed", 1, "--artifact-dir", out,
               # Without a rate aiperf spins on a core while it waits for answers. At 50 per second a turn waits 20 ms at most.
               "--request-rate", 50, "--arrival-pattern", "constant", "--concurrency-ramp-duration", args.ramp,
               # The client shares the cores with the server: as little of it as possible.
               "--workers-max", 1, "--record-processors", 1, "--stats-interval", 0, "--ui", "none", "--no-gpu-telemetry",
               "--no-server-metrics"]
    env = dict(os.environ, HOME=str(WORK))  # it looks for its files in the home folder
    before, server_before = resource.getrusage(resource.RUSAGE_CHILDREN), server.cpu_s()
    with open(WORK / f"aiperf-{server.name}.log", "w") as log:
        client = subprocess.Popen(common.strings(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=WORK,
                                  start_new_session=True)
        try:
            rc = client.wait(args.timeout)
        except subprocess.TimeoutExpired:
            rc = f"not done after {args.timeout:.0f} s"
        finally:
            if client.poll() is None:
                os.killpg(client.pid, signal.SIGKILL)
                client.wait()
    if rc != 0:
        raise Failed(f"aiperf: {rc}; {common.end_of(log.name)}; {common.end_of(server.log)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((out / "profile_export_aiperf.json").read_text())
    failed = sum(error["count"] for error in report.get("error_summary") or [])
    answered = report.get("request_count", {}).get("avg", 0)
    made = report.get("output_sequence_length", {}).get("avg", 0) * answered
    if failed or answered != expected or round(made) != tokens:
        raise Failed(f"{answered:.0f} of {expected} requests were answered, {failed} failed; {made:.0f} of {tokens} tokens came: "
                     f"{json.dumps(report.get('error_summary'))[:500]}; {common.end_of(server.log)}")
    found = {name: report[of][statistic] for name, (of, statistic, _) in FIGURES.items()}
    found |= {"requests": answered, "failed": failed, "seconds": report["benchmark_duration"]["avg"],
              "client CPU, s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
              "server CPU, s": server.cpu_s() - server_before}
    return found


def main():
    if not common.python("vllm") or not common.python("aiperf"):
        sys.exit(f"serving.py: no vllm or no aiperf in {ENGINES}: run bench/rivals/engines/install.sh")
    WORK.mkdir(parents=True, exist_ok=True)
    model, servers, rounds = folder(), [], []
    setting = common.setting([*(["vLLM"] if "vLLM" in args.only else []), "aiperf"], args.kvist)
    try:
        others = common.busy()
        for name, start in (("kvist", kvist), ("vLLM", vllm)):
            if name in args.only.split(","):
                servers.append(start(model))
        load(WORK / "warm-up", 0, 4)
        lines = [line for file in sorted((WORK / "warm-up").iterdir()) for line in file.read_text().splitlines()]
        counts = {}
        for server in servers:
            with server.awake():
                counts[server.name] = [server.prompt_tokens(line) for line in lines]
        if len(set(map(tuple, counts.values()))) > 1:
            raise Failed(f"the servers count other tokens for the same prompts: {counts}")
        print(f"others take {others:.0%} of the cores", file=sys.stderr)
        for turn in range(args.rounds):
            requests = WORK / "requests"
            expected, tokens = load(requests, args.seed + turn, args.conversations)
            rounds.append({})
            for server in servers[turn % 2:] + servers[:turn % 2]:
                before = os.getloadavg()[0]
                try:
                    with server.awake():
                        found = drive(server, model, requests, expected, tokens)
                except Failed as error:
                    print(f"round {turn + 1}: {server.name}: {error}", file=sys.stderr, flush=True)
                    continue
                rounds[-1][server.name] = found | {"load before": before, "load after": os.getloadavg()[0]}
                print(f"round {turn + 1}: {server.name}: {json.dumps({k: round(v, 2) for k, v in rounds[-1][server.name].items()})}",
                      file=sys.stderr, flush=True)
    except OSError as error:
        sys.exit(f"serving.py: {type(error).__name__}: {error}")
    finally:
        for server in servers:
            server.close()
        if args.json:
            settings = {key: str(value) for key, value in vars(args).items()}
            args.json.write_text(json.dumps({"setting": setting, "settings": settings, "rounds": rounds}, indent=1) + "\n")
    print(setting)
    table(rounds)


def table(rounds):
    print(f"{args.users} users, {args.conversations} conversations a round, medians of {args.rounds} rounds in turns, {args.threads} threads; x: "
          "how many times as good kvist is, the median of the rounds' ratios (and each round's)\n")
    print("| | kvist | vLLM | x |")
    print("|---|--:|--:|---|")
    for name, (_, _, more) in FIGURES.items():
        values = {server: [found[server][name] for found in rounds if server in found] for server in ("kvist", "vLLM")}
        cells = [f"{statistics.median(found):.1f}" if found else "" for found in values.values()]
        pairs = [(found["kvist"][name], found["vLLM"][name]) for found in rounds if len(found) == 2]
        ratios = [own / other if more else other / own for own, other in pairs]
        cells.append(f"{statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})" if ratios else "")
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| round | server | requests | failed | seconds | CPU of the server, of the client, s | load before, after |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    for number, found in enumerate(rounds, 1):
        for server, run in found.items():
            print(f"| {number} | {server} | {run['requests']:.0f} | {run['failed']} | {run['seconds']:.0f} "
                  f"| {run['server CPU, s']:.0f}, {run['client CPU, s']:.0f} | {run['load before']:.1f}, {run['load after']:.1f} |")


common.script(main)
