"""What a store that workers share needs: a program that can use one, and a Redis."""
import os
import shutil
import subprocess

import pytest
from fleet import free_port, until

# Without these a test is skipped if something is missing for it; with 1 it fails. run.sh sets the first where there is a Redis.
STRICT = os.environ.get("KVIST_CI_STRICT") == "1"
REQUIRED = STRICT or os.environ.get("KVIST_REQUIRE_REDIS") == "1"


def missing(what, required=REQUIRED):
    pytest.fail(what) if required else pytest.skip(f"NOT TESTED: {what}")


class Redis:
    """A server of its own, which keeps nothing on a disk."""

    def __init__(self, folder):
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if not program:
            missing("there is no redis-server or valkey-server (Debian: redis-server)")
        self.port, self.log = free_port(), folder / "redis.log"
        self.process = subprocess.Popen(
            [program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"],
            cwd=folder, stdout=open(self.log, "w"), stderr=subprocess.STDOUT)
        self.url = f"redis://127.0.0.1:{self.port}/kvist"
        until("Redis listens", self.is_ready)

    def is_ready(self):
        assert self.process.poll() is None, self.log.read_text()
        return "Ready to accept connections" in self.log.read_text()

    def stop(self):
        self.process.kill()
        self.process.wait()


def needs_stores():
    """Skips the test if the program was built without shared stores."""
    command = [os.environ["KVIST"], "serve", "--dry-run", "--tier-store", "fs:///tmp"]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode != 0:
        assert "shared-tier" in tried.stderr, tried.stderr
        missing("$KVIST cannot use a shared store: cargo build -p kvist --features tiers")


@pytest.fixture
def redis(tmp_path):
    needs_stores()
    server = Redis(tmp_path)
    yield server
    server.stop()
