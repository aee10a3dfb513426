"""Workers, routers, and what a client sees of them."""
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

MODEL = "tiny-rust-7m"
# Only ends a run that would hang.
PATIENCE = 900


# Below the ports that the system gives to outgoing connections, so that none of these takes a port before its worker listens.
_lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
_ports = list(range(max(1024, _lowest - 12000), _lowest)) or list(range(1024, 65536))
random.shuffle(_ports)


def free_port():
    """A port that is free now, and that no earlier call has returned."""
    while _ports:
        port = _ports.pop()
        with socket.socket() as listener:
            # A connection that has ended a moment ago does not occupy the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("all ports are in use")


def until(what, is_true):
    end = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE} s"
        time.sleep(0.05)


def call(url, body=None, headers=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return response.read().decode()


def bearer(key):
    return {"authorization": f"Bearer {key}"} if key else {}


class Worker:
    """One `kvist serve` with KV events, on the same ports whenever it is started."""

    def __init__(self, folder, port=None, *flags, key=None):
        self.port = port or free_port()
        self.events, self.replays = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder, self.flags, self.key = folder, flags, key
        self.start()
        # The router calls it so, also after a restart.
        self.name = json.loads(self.call("/get_server_info"))["instance_id"]

    def start(self):
        command = [os.environ["KVIST"], "serve", "--port", str(self.port), "--threads", "1", "-q",
                   "--kv-events", f"tcp://127.0.0.1:{self.events}",
                   "--kv-events-replay", f"tcp://127.0.0.1:{self.replays}", *self.flags]
        self.log = open(self.folder / f"worker-{self.port}.log", "a")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout.readline().startswith("serving "), Path(self.log.name).read_text()

    def call(self, path, body=None):
        return call(self.url + path, body, bearer(self.key))

    def metric(self, name):
        """The value of a metric, summed over its labels."""
        lines = self.call("/metrics").splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")]
        assert values, f"there is no metric {name}"
        return sum(values)

    def complete(self, prompt):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        return json.loads(self.call("/v1/completions", body))["usage"]

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Router:
    """`key`: sent to the workers by the router itself, and by the calls of this class, unless they say another one."""

    def __init__(self, kind, policy, workers, folder, key=None):
        self.kind, self.workers, self.key = kind, workers, key
        # Where the log was when a worker was started again.
        self.restarts = {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{kind}.log"
        program = Path(sys.executable).parent / kind
        command = [program, *(["launch"] if kind == "smg" else []), "--host", "127.0.0.1", "--port", self.port,
                   "--prometheus-port", free_port(), "--policy", policy, "--log-level", "debug",
                   # A worker that shuts down is still alive (/health), and takes no more requests (/ready).
                   "--health-check-endpoint", "/ready", "--health-check-interval-secs", 1,
                   "--health-failure-threshold", 2, "--worker-urls",
                   *(worker.url for worker in workers)]
        if kind == "vllm-router":
            # Without the second one a worker that has failed is left out for a minute.
            command += ["--worker-startup-check-interval", 1, "--cb-timeout-duration-secs", 1]
            if policy == "kv_aware":
                command += ["--kv-aware-session-affinity-ttl-secs", 3600]
            if key:
                command += ["--api-key", key]
        self.process = subprocess.Popen(list(map(str, command)), stdout=open(self.log, "w"), stderr=subprocess.STDOUT)
        until("the router serves the model", lambda: MODEL in (self.quiet("/v1/models") or ""))

    def restart(self, worker):
        """Kills a worker and starts it again. The numbers of its messages begin anew."""
        worker.kill()
        self.restarts[worker.name] = len(self.text())
        worker.start()

    def quiet(self, path):
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return call(self.url + path, headers=bearer(self.key))
        except OSError:
            return None

    def text(self):
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text())

    def knows_all(self):
        """Waits until the router has applied every event that the workers have published."""
        if self.kind != "vllm-router":
            return
        for worker in self.workers:
            last = worker.metric("kvist_kv_event_messages_total") - 1
            until(f"the router has message {last} of {worker.name}", lambda: last <= 0 or self.seen(worker) >= last)

    def seen(self, worker):
        """The last number that the router has of a worker."""
        lines = self.text()[self.restarts.get(worker.name, 0):].splitlines()
        return max((int(seq) for line in lines if worker.name in line
                    for seq in re.findall(r"\bseq=(\d+)", line)[:1]), default=-1)

    def complete(self, prompt, **more):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        return json.loads(call(self.url + "/v1/completions", body))["usage"]

    def chat(self, text):
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        return json.loads(call(self.url + "/v1/chat/completions", body))["usage"]

    def which(self, run):
        """The worker that served `run`, and what it returned. Nothing else may run."""
        before = [worker.metric("vllm:request_success_total") for worker in self.workers]
        usage = run()
        served = lambda: [worker for worker, n in zip(self.workers, before)
                          if worker.metric("vllm:request_success_total") > n]
        until("a worker has served it", served)
        worker, = served()
        return worker, usage


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]
