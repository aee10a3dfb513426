"""Models on a GPU through wgpu, or on lavapipe, where there is one: KVIST_REQUIRE_WGPU=1 insists on it."""
import json
import os
import subprocess
import sys

import pytest

import kvist

PROMPT = "The capacity of a vector is the amount of space allocated for any future elements"
F32 = {"weights": "f32"}


def devices():
    out = subprocess.run([sys.executable, "-m", "kvist", "devices", "--json"], capture_output=True, text=True, check=True)
    found = json.loads(out.stdout)
    return [device for device in found["devices"] if device.get("adapter") and not device["adapter"].get("why_not")]


@pytest.fixture(scope="module")
def models():
    if not devices():
        assert os.environ.get("KVIST_REQUIRE_WGPU") != "1", "no GPU, or the package was built without wgpu"
        pytest.skip("no GPU, or a build without wgpu")
    return [kvist.Model(backend=backend, deterministic=True, **F32) for backend in ("cpu", "wgpu")]


def test_texts_are_those_of_the_cpu(models):
    texts = [model.generate(PROMPT, max_tokens=32, temperature=0, kv="f32").result() for model in models]
    assert texts[0] and texts[1] == texts[0]
    assert [model.backend for model in models] == ["cpu", "wgpu"]


def test_sessions_fork_and_are_saved(models, tmp_path):
    texts = []
    for model in models:
        session = model.session(kv="f32")
        session.generate(PROMPT, max_tokens=8, temperature=0).result()
        branch = session.fork()
        more = [branch.generate(max_tokens=8, temperature=0).result(), session.generate(" It", max_tokens=8, temperature=0).result()]
        session.save(tmp_path / "s.kvs")
        more.append(model.resume(tmp_path / "s.kvs").generate(max_tokens=4, temperature=0).result())
        texts.append(more)
    assert texts[1] == texts[0]


def test_batches_and_prefixes(models, tmp_path):
    texts = []
    for model in models:
        prefix = model.freeze_prefix(PROMPT * 2, tmp_path / f"{model.backend}.kvp", kv="f32")
        with kvist.Batch(model, prefix=prefix) as batch:
            found = [batch.submit(model.decode(prefix.tokens) + more, max_tokens=8, temperature=0) for more in (" It", " that")]
            texts.append([one.result() for one in found])
            assert min(one.cached_tokens for one in found) >= 16
    assert texts[1] == texts[0]
    with pytest.raises(kvist.Error, match="freeze it again"):
        models[1].session(prefix=tmp_path / "cpu.kvp")
    with pytest.raises(kvist.Error, match="freeze"):
        models[1].share_prefix(PROMPT)


def test_what_is_not_there_is_refused():
    with pytest.raises(kvist.Error, match="no adapter|built without"):
        kvist.Model(backend="wgpu:99")
    for name in ("abacus", "CUDA", "cpu:0", ""):
        with pytest.raises(kvist.ArgumentError, match="backend"):
            kvist.Model(backend=name)
