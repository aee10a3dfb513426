"""The part of check.sh that reads the manifests. Argument: the program."""
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import yaml
from cloudcoil.models.prometheus_operator import v1 as operator

HERE, KVIST = pathlib.Path(__file__).parent, sys.argv[1]
FILES = {path: [*yaml.safe_load_all(path.read_text())] for path in sorted(HERE.rglob("*.yaml"))}
assert all(documents and all(documents) for documents in FILES.values()), "a file has an empty document"


def check_pod_monitor(document):
    read = operator.PodMonitor.model_validate(document)
    # The model drops fields that the operator does not know.
    assert read.model_dump(by_alias=True, exclude_unset=True) == document, f"unknown fields in {document}"


def check_worker(where, args):
    """The program takes these arguments."""
    assert args[0] == "serve", args
    tried = subprocess.run([KVIST, *args, "--dry-run"], capture_output=True, text=True)
    assert tried.returncode == 0, f"{where}: {tried.stderr}"


def check_store(where, args):
    """The stores take these arguments; each has a bound, and only that of blocks evicts."""
    flags = dict(zip(args[::2], args[1::2]))
    policy = "noeviction" if "sessions" in where else "allkeys-lru"
    assert flags["--maxmemory-policy"] == policy and flags["--maxmemory"].endswith(("mb", "gb")), f"{where}: {args}"
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if not program:
        print(f"deploy: NOT CHECKED: {where} by a server, because there is no valkey-server or redis-server", file=sys.stderr)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        command = [program, *args, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        server = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
        try:
            while "Ready to accept connections" not in log.read_text():
                assert server.poll() is None, f"{where}: {log.read_text()}"
                time.sleep(0.05)
        finally:
            server.kill()
            server.wait()


def check_router(where, args):
    """Sessions stay on their worker, and a worker that is gone is noticed in seconds."""
    for flag in ("--policy=kv_aware", "--kv-aware-session-affinity-ttl-secs=", "--health-check-interval-secs=", "--health-failure-threshold="):
        assert any(arg.startswith(flag) for arg in args), f"{where}: no {flag}"


def containers(document):
    pods = document.get("spec", {}).get("template", {}).get("spec", {})
    return pods.get("containers", [])


def hosts(args):
    """The servers that the flags of a worker name."""
    return {arg.split("redis://")[1].split(":")[0] for arg in args if "redis://" in arg}


n_monitors = n_workers = n_stores = n_routers = 0
services = {document["metadata"]["name"] for documents in FILES.values() for document in documents
            if document.get("kind") == "Service"}
for path, documents in FILES.items():
    for document in documents:
        if document.get("kind") == "PodMonitor":
            check_pod_monitor(document)
            n_monitors += 1
        for container in containers(document):
            where = f"{path.name}, {document['metadata']['name']}"
            if container["name"] == "kvist":
                check_worker(where, container["args"])
                assert hosts(container["args"]) <= services, f"{where}: no Service for {hosts(container['args'])}"
                n_workers += 1
            if container["name"] == "router":
                check_router(where, container["args"])
                n_routers += 1
            if container["name"] == "valkey":
                check_store(where, container["args"])
                n_stores += 1
        for name, service in document.get("services", {}).items():
            if service.get("image") == "kvist":
                check_worker(f"{path.name}, {name}", service["command"])
                assert hosts(service["command"]) <= set(document["services"]), service["command"]
                n_workers += 1
            if name == "router":
                check_router(f"{path.name}, {name}", service["command"])
                n_routers += 1
            if service.get("image", "").startswith("valkey/"):
                check_store(f"{path.name}, {name}", service["command"][1:])
                n_stores += 1
# So that a renamed container is not passed over.
found = (n_monitors, n_workers, n_stores, n_routers)
assert found == (1, 4, 4, 2), found
print(f"deploy: {n_monitors} PodMonitor, the flags of {n_workers} workers, {n_stores} stores and {n_routers} routers")
