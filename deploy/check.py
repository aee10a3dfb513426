"""The part of check.sh that reads the manifests. Argument: the program. What is skipped is appended to the file DEPLOY_SKIPPED."""
import argparse
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import yaml
from cloudcoil.models.prometheus_operator import v1 as operator

try:
    from vllm_router import __version__ as router_version
    from vllm_router.router_args import RouterArgs
except ImportError:
    RouterArgs = None

HERE, KVIST = pathlib.Path(__file__).parent, sys.argv[1]
# Of the workspace: the first one in Cargo.toml.
VERSION = re.search(r'^version = "(.+)"', (HERE.parent / "Cargo.toml").read_text(), re.M)[1]
FILES = {path: [*yaml.safe_load_all(path.read_text())] for path in sorted(HERE.rglob("*.yaml"))}
assert all(documents and all(documents) for documents in FILES.values()), "a file has an empty document"


def skip(what):
    with open(os.environ["DEPLOY_SKIPPED"], "a") as skipped:
        print(what, file=skipped)


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
        skip(f"{where} by a server, because there is no valkey-server or redis-server")
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


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise AssertionError(message)


def check_router(where, args):
    """The router takes these arguments. Sessions stay on their worker; a worker that is gone or shuts down is noticed in seconds."""
    for flag in ("--policy=kv_aware", "--kv-aware-session-affinity-ttl-secs=", "--health-check-endpoint=/ready",
                 "--health-check-interval-secs=", "--health-failure-threshold="):
        assert any(arg.startswith(flag) for arg in args), f"{where}: no {flag}"
    if RouterArgs is None:
        skip(f"{where} by vllm-router's own parser, because its wheel is not to be had")
        return
    # No abbreviations, which the router takes: with a newer one they may be those of another option.
    parser = Parser(allow_abbrev=False)
    RouterArgs.add_cli_args(parser)
    try:
        read = RouterArgs.from_cli_args(parser.parse_args(args))
        read._validate_router_args()
    except (AssertionError, ValueError) as refused:
        raise AssertionError(f"{where}: vllm-router does not take its arguments: {refused}") from refused
    assert read.health_check_interval_secs * read.health_failure_threshold <= 10, f"{where}: a dead worker is noticed late"
    assert read.worker_urls or (read.service_discovery and read.selector), f"{where}: the router has no workers"


def check_probes(where, container):
    """All cores compute, so probes may be answered late: that neither takes a worker out nor restarts it."""
    for probe, path, least_s, least_failures in (("startupProbe", "/ready", 5, 3), ("readinessProbe", "/ready", 5, 3),
                                                 ("livenessProbe", "/health", 10, 3)):
        has = container[probe]
        assert has["httpGet"]["path"] == path, f"{where}: {probe} asks for {has['httpGet']['path']}"
        assert has.get("timeoutSeconds", 1) >= least_s, f"{where}: {probe} needs timeoutSeconds of at least {least_s}"
        assert has.get("failureThreshold", 3) >= least_failures, f"{where}: {probe} needs a failureThreshold of at least {least_failures}"


def check_published(where, ports):
    """Nothing that is published asks for keys: the workers have `--open`, and the router and Grafana have none."""
    for port in ports:
        assert re.match(r"(127\.0\.0\.1|\[::1\]):\d*:\d+", str(port)), f"{where}: {port} is published on all addresses"


def containers(document):
    pods = document.get("spec", {}).get("template", {}).get("spec", {})
    return pods.get("containers", [])


def hosts(args):
    """The servers that the flags of a worker name."""
    return {arg.split("redis://")[1].split(":")[0] for arg in args if "redis://" in arg}


n_monitors = n_workers = n_stores = n_routers = 0
routers = set()
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
                assert container["image"] == f"kvist:{VERSION}", f"{where}: {container['image']}, but this is kvist {VERSION}"
                check_probes(where, container)
                check_worker(where, container["args"])
                assert hosts(container["args"]) <= services, f"{where}: no Service for {hosts(container['args'])}"
                n_workers += 1
            if container["name"] == "router":
                routers.add(container["image"].split(":")[1])
                check_router(where, container["args"])
                n_routers += 1
            if container["name"] == "valkey":
                check_store(where, container["args"])
                n_stores += 1
        for name, service in document.get("services", {}).items():
            check_published(f"{path.name}, {name}", service.get("ports", []))
            if service.get("image") == "kvist":
                check_worker(f"{path.name}, {name}", service["command"])
                assert hosts(service["command"]) <= set(document["services"]), service["command"]
                n_workers += 1
            if name == "router":
                routers |= set(re.findall(r"vllm-router==(\S+)", service["build"]["dockerfile_inline"]))
                check_router(f"{path.name}, {name}", service["command"])
                n_routers += 1
            if service.get("image", "").startswith("valkey/"):
                check_store(f"{path.name}, {name}", service["command"][1:])
                n_stores += 1
assert len(routers) == 1 and (RouterArgs is None or routers == {router_version}), f"versions of vllm-router: {routers}"
containerfile = (HERE / "Containerfile").read_text()
tags = re.findall(r"--tag (\S+)", containerfile)
assert tags == [f"kvist:{VERSION}", "kvist"], f"Containerfile: the tags are {tags}, and this is kvist {VERSION}"
published = re.findall(r" run .*(?:--publish|-p)[ =](\S+)", containerfile)
assert published and "--open" in containerfile, "Containerfile: no command that publishes a port"
check_published("Containerfile", published)
# So that a renamed container is not passed over.
found = (n_monitors, n_workers, n_stores, n_routers)
assert found == (1, 4, 4, 2), found
print(f"deploy: {n_monitors} PodMonitor, the flags of {n_workers} workers, {n_stores} stores and {n_routers} routers")
