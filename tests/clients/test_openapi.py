"""Schemathesis with all its checks on /openapi.json: the description and the server say the same."""
import os
import pathlib
import subprocess
import sys

import pytest
from server import Server
from test_errors import becomes_free

HERE = pathlib.Path(__file__).resolve().parent
CONFIG = """
[cache]
tokens = 512
[limits]
max_choices = 4
request_timeout_s = 8.0
{keys}
"""
KEYS = """
[[keys]]
name = "ops"
key = "ops-secret"
admin = true
"""


@pytest.mark.parametrize("keys", [False, True])
def test_schemathesis(tmp_path, keys):
    config = tmp_path / "kvist.toml"
    config.write_text(CONFIG.format(keys=KEYS if keys else ""))
    server = Server("--config", config)
    command = [
        pathlib.Path(sys.executable).parent / "schemathesis", "--config-file", HERE / "schemathesis.toml",
        "run", server.url + "/openapi.json", "--checks", "all", "--continue-on-failure",
        "--max-time", os.environ.get("KVIST_FUZZ_SECONDS", "120"),
    ]
    command += ["--header", "Authorization: Bearer ops-secret"] if keys else []
    try:
        run = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(HERE)})
        assert run.returncode == 0, run.stdout[-12_000:] + run.stderr[-2000:]
        becomes_free(server, "ops-secret")
        for name in ["kvist_cells_held", "kvist_failed_steps_total"]:
            assert server.metric(name, "ops-secret") == 0
    finally:
        assert server.stop() == 0
