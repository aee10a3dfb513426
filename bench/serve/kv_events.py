#!/usr/bin/env python3
"""What KV events cost a server: the same load without events, with events and no subscriber, with a subscriber that reads them,
and with one that does not; in turns, medians.

    bench/serve/kv_events.py --kvist target/release/kvist [--model MODEL] [--rounds 5]      (needs pyzmq)

Every prompt is new, so each of its blocks is stored and, once the cache is full, evicted: as many events as there can be.
"""
import argparse
import contextlib
import json
import pathlib
import random
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import zmq

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402

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


class Server(common.Kvist):
    def __init__(self, variant):
        flags = ["--kv-events", "tcp://127.0.0.1:0"] if variant != "off" else []
        super().__init__(args.kvist, "--context", "8192", *flags, model=args.model, name=f"kvist serve, {variant}")
        self.received, self.context = 0, zmq.Context()
        self.subscribes, self.reads = VARIANTS[variant]

    def subscribe(self):
        if self.subscribes:
            endpoint = json.loads(self.get("/kv_event_sources"))["0"]["endpoint"]
            self.socket = self.context.socket(zmq.SUB)
            self.socket.setsockopt(zmq.RCVHWM, 1)
            self.socket.setsockopt(zmq.SUBSCRIBE, b"")
            self.socket.connect(endpoint)
            if self.reads:
                threading.Thread(target=self.receive, daemon=True).start()

    def receive(self):
        while True:
            self.socket.recv_multipart()
            self.received += 1

    def complete(self, prompt):
        self.post("/v1/completions", {"prompt": prompt, "max_tokens": args.generate, "ignore_eos": True, "temperature": 0})

    def seconds(self, seed):
        numbers = random.Random(seed)
        prompts = [[numbers.randrange(300, 4000) for _ in range(args.prompt)] for _ in range(args.requests)]
        begin = time.monotonic()
        with ThreadPoolExecutor(args.clients) as pool:
            list(pool.map(self.complete, prompts))
        return time.monotonic() - begin


def main():
    with contextlib.ExitStack() as stack:
        servers = {variant: stack.enter_context(Server(variant)) for variant in VARIANTS}
        for server in servers.values():
            server.subscribe()
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


common.script(main)
