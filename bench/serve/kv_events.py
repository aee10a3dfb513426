#!/usr/bin/env python3
"""What KV events cost a server: the same load without events, with events and no subscriber, with a subscriber that reads them,
and with one that does not; in turns, medians.

    bench/serve/kv_events.py --kvist target/release/kvist [--model MODEL] [--rounds 5]      (needs pyzmq)

Every prompt is new, so each of its blocks is stored and, once the cache is full, evicted: as many events as there can be.
"""
import argparse
import json
import random
import statistics
import subprocess
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import zmq

parser = argparse.ArgumentParser()
parser.add_argument("--kvist", required=True)
parser.add_argument("--model")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--requests", type=int, default=120)
parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
parser.add_argument("--generate", type=int, default=16, help="tokens of an answer")
parser.add_argument("--clients", type=int, default=8)
args = parser.parse_args()
# Whether a consumer subscribes, and whether it reads.
VARIANTS = {"off": (False, False), "on, no consumer": (False, False), "on, consumer": (True, True), "on, stuck consumer": (True, False)}


class Server:
    def __init__(self, variant):
        flags = ["--kv-events", "tcp://127.0.0.1:0"] if variant != "off" else []
        flags += ["--model", args.model] if args.model else []
        command = [args.kvist, "serve", "--port", "0", "-q", "--context", "8192", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().split()[-1]
        self.received, self.context = 0, zmq.Context()
        subscribes, reads = VARIANTS[variant]
        if subscribes:
            endpoint = json.loads(self.get("/kv_event_sources"))["0"]["endpoint"]
            self.socket = self.context.socket(zmq.SUB)
            self.socket.setsockopt(zmq.RCVHWM, 1)
            self.socket.setsockopt(zmq.SUBSCRIBE, b"")
            self.socket.connect(endpoint)
            if reads:
                threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        while True:
            self.socket.recv_multipart()
            self.received += 1

    def get(self, path):
        return urllib.request.urlopen(self.url + path, timeout=60).read().decode()

    def metric(self, name):
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.get("/metrics").splitlines() if line.startswith(name + "{"))

    def complete(self, prompt):
        body = {"prompt": prompt, "max_tokens": args.generate, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        urllib.request.urlopen(request, timeout=600).read()

    def seconds(self, seed):
        numbers = random.Random(seed)
        prompts = [[numbers.randrange(300, 4000) for _ in range(args.prompt)] for _ in range(args.requests)]
        begin = time.monotonic()
        with ThreadPoolExecutor(args.clients) as pool:
            list(pool.map(self.complete, prompts))
        return time.monotonic() - begin


servers = {variant: Server(variant) for variant in VARIANTS}
try:
    for server in servers.values():
        server.seconds(0)
    times = {variant: [] for variant in VARIANTS}
    for round in range(1, args.rounds + 1):
        for variant, server in servers.items():
            times[variant].append(server.seconds(round))
    tokens = args.requests * (args.prompt + args.generate)
    base = statistics.median(times["off"])
    for variant, server in servers.items():
        median = statistics.median(times[variant])
        events = server.metric("kvist_blocks_stored_total") + server.metric("kvist_blocks_evicted_total")
        rate = events / (args.rounds + 1) / median
        print(f"{variant:20} {tokens / median:8.0f} tokens/s  {base / median:5.3f}x  {rate:6.0f} block events/s"
              f"  messages {server.metric('kvist_kv_event_messages_total'):.0f}, read {server.received}")
finally:
    for server in servers.values():
        server.process.kill()
