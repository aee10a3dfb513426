"""NVIDIA's aiperf drives the server, over chat and completions, without an error."""
import json
import os
import pathlib
import shutil
import subprocess

import pytest
from server import ROOT

HERE = pathlib.Path(__file__).resolve().parent
REQUESTS, TOKENS = 64, 32


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A folder that transformers can load: the embedded model's tokenizer, so that nothing is looked up elsewhere."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(ROOT / "tools/tiny-model" / name, folder)
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 4096}')
    return folder


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(tool_model, tokenizer, tmp_path, endpoint):
    generated = tool_model.metric("vllm:generation_tokens_total")
    run = subprocess.run([
        HERE / ".venv-load/bin/aiperf", "profile", "--url", tool_model.url, "--model", tool_model.name,
        "--endpoint-type", endpoint, "--streaming", "--tokenizer", tokenizer, "--use-server-token-count",
        "--concurrency", "8", "--request-count", str(REQUESTS), "--isl", "128", "--osl", str(TOKENS),
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", tmp_path / "out",
    ], cwd=tmp_path, capture_output=True, text=True, timeout=3600, env={**os.environ, "HOME": str(tmp_path)})
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    report = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary"), report["error_summary"]
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == TOKENS
    assert tool_model.metric("vllm:generation_tokens_total") - generated == REQUESTS * TOKENS
