#!/usr/bin/env python3
"""A crowd of bad clients against `kvist serve` for some minutes, and what is left of the server afterwards.

    bench/serve/soak.py --kvist target/release/kvist --minutes 10 --clients 256

Every client streams completions one after the other. Of its requests some break off after a random number of events,
some are longer than the context, some are no JSON, some come with a wrong key, some are of the other API, some are made
to cost much before the model sees them (nested tools, megabytes of blanks: --attacks), and every
--burst seconds all clients at once send more than the queue has room for. Meanwhile one thread asks /health without a
pause of more than 50 ms, and another samples the resident memory (Linux: /proc) and /metrics.

Beside them, unless --dribblers is 0, clients try to keep others out (class Doors): connections beyond
max_connections that send their headers a byte at a time and come again when they are closed; one key that asks for
n = 64 from ten threads; and bodies that stay unfinished, with and without a key. A client with a key of its own behaves
well meanwhile.

It ends with 1, and says why, unless
  * every answer was one that the request deserves (a whole stream ends with [DONE] and the usage it was asked for);
  * every /health was 200, and its 99th percentile is under --health-p99;
  * every request of the well-behaved client was answered 200, and the 99th percentile of its times is under --calm-p99;
  * within five seconds after the clients have left, no cell is in use and no request runs or waits;
  * the greedy text of a prompt is what it was before (bytes of the cache have not come to the wrong hands);
  * resident memory stayed under the printed bound of weights, cache, working memory and requests plus --overhead, which
    is for what the bound does not name: program, tokenizer, sessions, connections;
  * SIGTERM ends the server with status 0.

If the server ends before that, the report says so, with the end of its log, and has what was seen until then.

The report is one JSON document on stdout. Only the standard library is needed. Figures of a busy machine say little:
the load average is in the report.
"""
import argparse
import collections
import datetime
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402

KEY, ADMIN, HOG, CALM = "soak-user-key", "soak-admin-key", "soak-hog-key", "soak-calm-key"
CONFIG = """
[http]
port = 0
[scheduler]
max_batch = {batch}
[limits]
max_queue = {queue}
max_connections = {connections}
request_timeout_s = 60.0
[[keys]]
name = "user"
key = "{key}"
[[keys]]
name = "hog"
key = "{hog}"
[[keys]]
name = "calm"
key = "{calm}"
[[keys]]
name = "ops"
key = "{admin}"
admin = true
"""


class Server(common.Kvist):
    def __init__(self, args, folder):
        config = pathlib.Path(folder) / "kvist.toml"
        config.write_text(CONFIG.format(batch=args.batch, queue=args.queue, connections=args.connections,
                                        key=KEY, admin=ADMIN, hog=HOG, calm=CALM))
        flags = ["--config", config, "--context", args.context]
        model = ["--model", args.model] if args.model else []
        plan = json.loads(common.output([args.kvist, "serve", "-q", *model, *flags, "--dry-run", "--json"]))
        # The model, and requests while they are made ready.
        self.bound = plan["bound"]["total"] + plan["requests_bytes"]
        # Deterministic, so that the text of a prompt can be compared.
        super().__init__(args.kvist, *flags, "--deterministic", model=args.model, name="the server")
        self.host, port = self.address.rsplit(":", 1)
        self.port = int(port)

    def connect(self, timeout=120):
        return super().connect(timeout)

    def get(self, path):
        return self.ask("GET", path, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30).decode()

    def metrics(self):
        """Values by name, summed over labels."""
        found = collections.Counter()
        for line in self.get("/metrics").splitlines():
            if not line.startswith("#"):
                found[line.split("{")[0]] += float(line.split()[-1])
        return found

    def resident_bytes(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024

    def threads(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"Threads:\s+(\d+)", status)[1])

    def greedy(self):
        body = {"prompt": "fn main() {", "max_tokens": 48, "temperature": 0}
        connection = self.connect()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), head(KEY))
            answer = connection.getresponse()
            document = json.loads(answer.read())
            return document["choices"][0]["text"] if answer.status == 200 else document
        finally:
            connection.close()


def head(key):
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}


class Wrong(Exception):
    """An answer that the request did not deserve."""


class Load:
    """What happened, from all threads."""

    def __init__(self):
        self.lock = threading.Lock()
        self.over = threading.Event()  # Clients stop then.
        self.outcomes = collections.Counter()
        self.wrong = []
        self.first_s, self.tokens = [], 0

    def count(self, outcome):
        with self.lock:
            self.outcomes[outcome] += 1

    def accuse(self, what):
        with self.lock:
            self.wrong.append(what)


WORDS = "the of a trait type value borrow move match impl loop iterator closure lifetime Result Option vector".split()
# Beginnings that many requests share.
TRUNKS = [" ".join(random.Random(i).choices(WORDS, k=120)) for i in range(8)]


def stream(server, load, draw, body, leave=None):
    """One streaming request. `leave`: break off after so many events."""
    connection = server.connect()
    began = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), head(KEY))
        answer = connection.getresponse()
        if answer.status != 200:
            document = json.loads(answer.read())
            if answer.status == 429 and document["error"]["code"] == "queue_full":
                if not answer.getheader("Retry-After"):
                    raise Wrong("429 without Retry-After")
                return "429 queue_full"
            if answer.status == 408 and document["error"]["code"] == "deadline_exceeded":
                return "408 deadline_exceeded"
            raise Wrong(f"{answer.status} to a good request: {document}")
        events, usage, told = 0, None, None
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            events += 1
            if events == 1:
                with load.lock:
                    load.first_s.append(time.monotonic() - began)
            if leave is not None and events > leave:
                # A reset, as of a process that was killed, or an orderly end.
                if draw.random() < 0.5:
                    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return "left in mid-stream"
            if line.strip() == b"data: [DONE]":
                if told is not None:
                    return told
                asked = body["max_tokens"] * body.get("n", 1)
                if usage is None or usage["completion_tokens"] != asked:
                    raise Wrong(f"a stream of {asked} tokens ended with the usage {usage}")
                with load.lock:
                    load.tokens += usage["completion_tokens"]
                return "finished"
            event = json.loads(line[6:])
            if "error" in event:
                told = f"told in the stream: {event['error']['code']}"
                if event["error"]["code"] != "deadline_exceeded":
                    raise Wrong(told)
            usage = event.get("usage") or usage
        raise Wrong(f"a stream ended after {events} events without [DONE]")
    finally:
        connection.close()


def expect(server, status, code, body, key=KEY, path="/v1/completions"):
    """A request that is to be refused."""
    connection = server.connect()
    try:
        connection.request("POST", path, body, head(key))
        answer = connection.getresponse()
        said = answer.read()
        if answer.status == 429:
            return "429 queue_full"
        if answer.status != status or json.loads(said)["error"]["code"] != code:
            raise Wrong(f"{answer.status} where {status} {code} was due: {said[:300]}")
        return f"{status} {code}"
    finally:
        connection.close()


def leave_early(server, draw):
    """Go away before the answer, or before the request is complete."""
    body = json.dumps({"prompt": "fn", "max_tokens": 200, "ignore_eos": True}).encode()
    with socket.create_connection((server.host, server.port), 30) as raw:
        whole = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
                 f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body
        raw.sendall(whole[:draw.randrange(1, len(whole) + 1)])
        time.sleep(draw.uniform(0, 0.1))
    return "left without an answer"


def heavy(draw):
    """A path and a body that is small or allowed, and made to cost much: by nesting, by white space, by its values."""
    size = 4 << 20
    default = [1] * draw.choice([10, 20000])
    for _ in range(draw.choice([20, 100])):
        default = [default]
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "default": default}}}}}
    blanks = " " * (size - draw.randrange(1000, size // 2))
    said = lambda text: [{"role": "user", "content": text}]
    return draw.choice([
        ("/v1/chat/completions", json.dumps({"messages": said("hello"), "tools": [tool], "max_tokens": 1})),
        ("/v1/chat/completions", json.dumps({"messages": said("hello"), "max_tokens": 1,
                                             "chat_template_kwargs": {"a": default}})),
        ("/v1/chat/completions", json.dumps({"messages": said("a") * draw.choice([100, 20000]), "max_tokens": 1})),
        ("/v1/chat/completions", json.dumps({"messages": said(blanks), "max_tokens": 1})),
        ("/v1/completions", json.dumps({"prompt": blanks, "max_tokens": 1})),
        ("/v1/completions", json.dumps({"prompt": [blanks[:size // 40]] * 30, "max_tokens": 1})),
        ("/v1/sessions", json.dumps({"text": blanks})),
        ("/v1/sessions", json.dumps({"messages": said(blanks)})),
        ("/v1/sessions", json.dumps({"messages": said("a") * 250})),
        ("/tokenize", json.dumps({"prompt": blanks})),
        ("/tokenize", json.dumps({"prompt": "a" * len(blanks)})),
        ("/tokenize", json.dumps({"prompt": ("a" * 5 + "\t\n " * 3) * (len(blanks) // 20)})),
        ("/detokenize", json.dumps({"tokens": [5] * draw.choice([1000, 200000, 1000000])})),
        ("/tokenize", "[" + "[]," * (size // 4) + "[]]"),
        ("/tokenize", "[" * draw.choice([100, 100000])),
    ])


def attack(server, draw):
    """One of those; every other client leaves while its request is made ready. Any refusal will do, and so will an
    answer: what counts is what it costs the server."""
    path, body = heavy(draw)
    connection = server.connect()
    try:
        connection.request("POST", path, body, head(KEY))
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0, 0.2))
            return "attack left"
        answer = connection.getresponse()
        said = answer.read()
        if answer.status not in (200, 400, 408, 413, 429, 503):
            raise Wrong(f"{answer.status} to an attack on {path}: {said[:300]}")
        return f"attack {answer.status}"
    except (BrokenPipeError, ConnectionResetError):
        return "attack hung up on"
    finally:
        connection.close()


def one(server, load, draw, longest, attacks=0.0):
    if draw.random() < attacks:
        return attack(server, draw)
    dice = draw.random()
    body = {
        "prompt": draw.choice(TRUNKS) + " " + " ".join(draw.choices(WORDS, k=draw.randrange(1, 60))),
        "max_tokens": draw.randrange(1, 65), "temperature": draw.choice([0, 1]), "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, "cache_salt": draw.choice(["", "", "a", "b"]),
    }
    if dice < 0.50:
        return stream(server, load, draw, body)
    if dice < 0.70:
        return stream(server, load, draw, {**body, "max_tokens": 400}, leave=draw.randrange(0, 40))
    if dice < 0.75:
        return leave_early(server, draw)
    if dice < 0.80:
        long = draw.choice([json.dumps({"prompt": "word " * longest}), json.dumps({"prompt": [5] * (longest + 1)})])
        return expect(server, 400, "context_length_exceeded", long)
    if dice < 0.83:
        return expect(server, 413, "body_too_large", b" " * (5 << 20))
    if dice < 0.89:
        text = json.dumps(body)
        cut = draw.choice([text[:draw.randrange(len(text))], text + "}", "\x00" + text, text.replace(":", "=", 1), ""])
        return expect(server, 400, "invalid_json", cut.encode())
    if dice < 0.95:
        return expect(server, 401, "invalid_api_key", json.dumps(body), key="soak-wrong-key")
    if dice < 0.97:
        return expect(server, 400, "unknown_parameter", json.dumps({**body, "promt": "a"}))
    return stream(server, load, draw, {**body, "n": 4, "temperature": 1})


def client(server, load, seed, until, burst, args):
    draw = random.Random(seed)
    time.sleep(draw.uniform(0, 1))
    rounds = 0
    while time.monotonic() < until and not load.over.is_set():
        if args.burst and time.monotonic() > load.began + args.burst * (rounds + 1):
            rounds += 1
            try:
                burst.wait(20)  # all clients at once
            except threading.BrokenBarrierError:
                pass
        began = time.monotonic()
        try:
            outcome = one(server, load, draw, server.longest, args.attacks)
            load.count(outcome)
            if outcome.startswith("429"):
                time.sleep(draw.uniform(0, 0.5))
        except Wrong as wrong:
            load.accuse(str(wrong))
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            # The innermost line of this file: what the client was about.
            line = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__][-1]
            after = f"{time.monotonic() - began:.2f} s after the request began, {time.monotonic() - load.began:.0f} s after all"
            load.accuse(f"{type(error).__name__}: {error} (line {line}, {after})")


def health(server, times, wrong, over):
    connection = server.connect(30)
    while not over.is_set():
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                wrong.append(f"/health answers {answer.status}")
        except (OSError, http.client.HTTPException) as error:
            wrong.append(f"/health: {type(error).__name__}: {error}")
            connection.close()
        times.append(time.monotonic() - began)
        over.wait(0.05)


class Doors:
    """Clients that try to keep others out, and one that behaves well."""

    HOGS, UNFINISHED = 10, 32

    def __init__(self, server, dribblers):
        self.server, self.dribblers = server, dribblers
        self.over, self.lock = threading.Event(), threading.Lock()
        self.counts = collections.Counter()
        self.calm_s, self.refused_s = [], []
        tasks = [self.dribble, self.behave] + [self.hog] * self.HOGS
        tasks += [lambda i=i: self.leave_unfinished(i) for i in range(self.UNFINISHED)]
        self.threads = [threading.Thread(target=task, daemon=True) for task in tasks if dribblers]

    def start(self):
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.over.set()
        deadline = time.monotonic() + 90
        for thread in self.threads:
            thread.join(max(0, deadline - time.monotonic()))

    def count(self, what, times=None, seconds=None):
        with self.lock:
            self.counts[what] += 1
            if times is not None:
                times.append(seconds)

    def dribble(self):
        """Keep so many connections open, each with a head that never ends."""
        address, crowd = (self.server.host, self.server.port), []
        while not self.over.wait(0.25):
            while len(crowd) < self.dribblers and not self.over.is_set():
                raw = socket.socket()
                raw.setblocking(False)
                raw.connect_ex(address)
                crowd.append((raw, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Slow: "))
                self.count("dribblers opened")
            kept = []
            for raw, left in crowd:
                try:
                    left = left[raw.send(left[:1]):] or b"x"
                    closed = raw.recv(4096) == b""
                except BlockingIOError:
                    closed = False
                except OSError:
                    closed = True
                if closed:
                    raw.close()
                    self.count("dribblers closed by the server")
                else:
                    kept.append((raw, left))
            crowd = kept
        for raw, _ in crowd:
            raw.close()

    def ask(self, key, body):
        connection = self.server.connect()
        began = time.monotonic()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), head(key))
            answer = connection.getresponse()
            answer.read()
            return str(answer.status), time.monotonic() - began
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__, time.monotonic() - began
        finally:
            connection.close()

    def hog(self):
        body = {"prompt": "let mut all =", "max_tokens": 16, "n": 64, "temperature": 1, "ignore_eos": True}
        while not self.over.is_set():
            status, _ = self.ask(HOG, body)
            self.count(f"hog: {status}")
            if status != "200":
                self.over.wait(0.05)

    def behave(self):
        body = {"prompt": "fn calm() {", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        while not self.over.wait(0.2):
            status, seconds = self.ask(CALM, body)
            self.count(f"calm: {status}", self.calm_s, seconds)

    def leave_unfinished(self, i):
        """The head of a request and a byte of its body. The server waits for a client with a key, and refuses others at once."""
        key, length, expected = [("soak-wrong-key", 1000, 401), (HOG, 1 << 30, 413), (HOG, 1000, None)][i % 3]
        text = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{{").encode()
        while not self.over.wait(0.1):
            began = time.monotonic()
            try:
                with socket.create_connection((self.server.host, self.server.port), 30) as raw:
                    raw.settimeout(5 if expected is None else 30)
                    raw.sendall(text)
                    said = raw.recv(4096)
            except TimeoutError:
                said = b"waited for"
            except OSError as error:
                said = type(error).__name__.encode()
            if expected is None:
                self.count(f"unfinished: {said[:12].decode()}")
            else:
                self.count(f"unfinished: {said[:12].decode()}", self.refused_s, time.monotonic() - began)

    def failures(self, calm_p99):
        if not self.dribblers:
            return
        for what, n in sorted(self.counts.items()):
            if what.startswith("calm: ") and what != "calm: 200":
                yield f"a client that behaves well was answered {what.removeprefix('calm: ')}, {n} times"
        if not percentile(self.calm_s, 0.99) <= calm_p99:
            yield f"the 99th percentile of a client that behaves well is {percentile(self.calm_s, 0.99):.2f} s"
        for what in ("dribblers closed by the server", "hog: 429", "hog: 200", "unfinished: HTTP/1.1 401"):
            if not self.counts[what]:
                yield f"there was no {what!r}: the attack was none"

    def report(self):
        def times(values):
            return {"n": len(values), "median": shown(percentile(values, 0.5)), "p99": shown(percentile(values, 0.99))}
        asked = sum(n for what, n in self.counts.items() if what.startswith("calm: "))
        share = self.counts["calm: 200"] / asked if asked else None
        return {"dribblers": self.dribblers, "outcomes": dict(sorted(self.counts.items())), "calm_share_answered": share,
                "calm_s": times(self.calm_s), "refused_s": times(self.refused_s)}


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def shown(value, digits=3):
    """A number for the report. Of no values at all there is none, and the report has null."""
    return None if value is None or value != value else round(value, digits)


def settle(server, failures):
    """What is in use within five seconds after the clients have left, and the metrics then."""
    deadline = time.monotonic() + 5
    while True:
        metrics = server.metrics()
        left = {name: metrics[name] for name in
                ("kvist_cells_held", "vllm:num_requests_running", "vllm:num_requests_waiting")}
        if not any(left.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if any(left.values()):
        failures.append(f"no client is left, but still in use are {left}")
    if metrics["kvist_failed_steps_total"]:
        failures.append(f"{metrics['kvist_failed_steps_total']:.0f} steps failed")
    return left, metrics


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kvist", default="target/release/kvist")
    parse.add_argument("--model", help="without it the embedded one")
    parse.add_argument("--minutes", type=float, default=10)
    parse.add_argument("--clients", type=int, default=256)
    parse.add_argument("--context", type=int, default=16384, help="tokens of the cache")
    parse.add_argument("--batch", type=int, default=32)
    parse.add_argument("--queue", type=int, default=96, help="less than clients, so that bursts are refused")
    parse.add_argument("--connections", type=int, default=1024, help="max_connections")
    parse.add_argument("--dribblers", type=int, default=1100, help="connections that never finish their headers; 0: no attack")
    parse.add_argument("--calm-p99", type=float, default=30.0, help="seconds for the client that behaves well")
    parse.add_argument("--burst", type=float, default=30, help="seconds between bursts; 0 for none")
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--attacks", type=float, default=0.02, help="share of requests that are made to cost much")
    parse.add_argument("--health-p99", type=float, default=1.0, help="seconds")
    parse.add_argument("--overhead", type=float, default=96, help="MiB beside the bound")
    args = parse.parse_args()

    failures, samples, times, busy, unhealthy = [], [], [], [], []
    left, metrics = None, collections.Counter()
    # When the server has just ended, its /metrics, its files in /proc and requests raise one of these.
    gone = (common.Failed, OSError, http.client.HTTPException, TypeError, ValueError)
    with tempfile.TemporaryDirectory() as folder, Server(args, folder) as server:
        alive = lambda: server.process.poll() is None
        # The context of the model, or the cache where that is smaller.
        server.longest = json.loads(server.get("/v1/models"))["data"][0]["max_model_len"]
        text = server.greedy()
        at_start = server.resident_bytes()
        load, over = Load(), threading.Event()
        load.began = time.monotonic()
        until = load.began + args.minutes * 60
        burst = threading.Barrier(args.clients)
        seeds = [args.seed * 1_000_003 + i for i in range(args.clients)]
        crowd = [
            threading.Thread(target=client, args=(server, load, seed, until, burst, args), daemon=True)
            for seed in seeds
        ]
        watch = threading.Thread(target=health, args=(server, times, unhealthy, over), daemon=True)
        load_before = os.getloadavg()[0]
        watch.start()
        doors = Doors(server, args.dribblers)
        doors.start()
        for thread in crowd:
            thread.start()
        while time.monotonic() < until and alive():
            time.sleep(min(1, max(0, until - time.monotonic())))
            try:
                metrics = server.metrics()
                samples.append((server.resident_bytes(), metrics["kvist_cells_held"], server.threads()))
                busy.append(metrics["vllm:num_requests_running"])
            except gone as error:
                time.sleep(0.5)  # until the end of the process is known
                if alive():
                    load.accuse(f"/metrics: {type(error).__name__}: {error}")
        ended_after = None if alive() else time.monotonic() - load.began
        load.over.set()
        burst.abort()
        doors.stop()
        deadline = time.monotonic() + 90  # what runs may end
        for thread in crowd:
            thread.join(max(0, deadline - time.monotonic()))
        still = sum(thread.is_alive() for thread in crowd)
        if still:
            failures.append(f"{still} clients still wait for an answer")
        try:
            if alive():
                left, metrics = settle(server, failures)
            over.set()
            watch.join()
            if alive():
                again = server.greedy()
                if again != text:
                    failures.append(f"the same greedy request was answered {text!r}, and then {again!r}")
        except gone as error:
            if alive():
                failures.append(f"after the clients had left: {type(error).__name__}: {error}")
        over.set()
        peak = max((rss for rss, _, _ in samples), default=None)
        if peak is not None and peak > server.bound + args.overhead * 2**20:
            failures.append(f"resident memory reached {peak}, the bound is {server.bound}")
        p99 = percentile(times, 0.99)
        if alive():
            failures += doors.failures(args.calm_p99)
            if not p99 <= args.health_p99:
                failures.append(f"the 99th percentile of /health is {p99:.3f} s")
            # That the load was one.
            for outcome in ["finished", "left in mid-stream", "400 invalid_json", "401 invalid_api_key", "429 queue_full"]:
                if not load.outcomes[outcome]:
                    failures.append(f"there was no {outcome!r}: the load was too short")
            server.process.send_signal(signal.SIGTERM)
            try:
                if status := server.process.wait(60):
                    failures.append(f"SIGTERM ended the server with status {status}")
            except subprocess.TimeoutExpired:
                failures.append("SIGTERM did not end the server within 60 s")
        else:
            when = "after the clients had left" if ended_after is None else f"after {ended_after:.0f} s"
            failures.insert(0, f"the server ended with {server.process.returncode} {when}; {common.end_of(server.log)}")
        failures += sorted(set(unhealthy))[:20] + sorted(set(load.wrong))[:20]
    quarter = max(1, len(samples) // 4)
    resident = [rss for rss, _, _ in samples]
    median = lambda values: shown(statistics.median(values), None) if values else None
    report = {
        "machine": common.machine(), "date": datetime.date.today().isoformat(),
        "load_average": {"before": round(load_before, 2), "end": round(os.getloadavg()[0], 2)},
        "model": server.served, "clients": args.clients, "seconds": round(args.minutes * 60), "seed": args.seed,
        "outcomes": dict(sorted(load.outcomes.items())), "wrong_answers": len(load.wrong),
        "generated_tokens": load.tokens,
        "preemptions": metrics["vllm:num_preemptions_total"],
        "queue": args.queue, "batch": args.batch, "context_tokens": args.context,
        "ttft_s": {"median": shown(percentile(load.first_s, 0.5)), "p99": shown(percentile(load.first_s, 0.99))},
        "health": {"checks": len(times), "median_ms": shown(1e3 * percentile(times, 0.5), 2),
                   "p99_ms": shown(1e3 * p99, 2), "max_ms": shown(1e3 * max(times, default=float("nan")), 2)},
        "doors": doors.report(),
        "memory": {
            "bound_bytes": server.bound, "peak_over_bound": shown(peak and peak / server.bound), "resident_after_one_request": at_start,
            "peak_resident_bytes": peak,
            "median_resident_first_quarter": median(resident[:quarter]),
            "median_resident_last_quarter": median(resident[-quarter:]),
            "peak_threads": max((threads for _, _, threads in samples), default=None),
        },
        "peak_cells_held": max((held for _, held, _ in samples), default=None),
        "mean_running": round(statistics.mean(busy), 1) if busy else None,
        "held_at_the_end": left, "failures": failures,
    }
    print(json.dumps(report, indent=1))
    return 1 if failures else 0


common.script(main)
