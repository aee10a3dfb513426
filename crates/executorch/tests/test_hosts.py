"""The same file in the other hosts: C++ through the seed's names, and Rust. test.sh builds both beside the library."""

import os
import subprocess
from pathlib import Path

import torch

import kvist.executorch as ke

HOSTS = Path(os.environ["KVIST_EXECUTORCH_LIBRARY"]).parent


def greedy(program, prompt, n, dtype=torch.float32, **more):
    session = ke.make_decode_session("kvist", ke.make_config(program.cache_params, 128, dtype, **more))
    text, fed, position = [], prompt, 0
    for _ in range(n):
        logits, *_ = program.run(session, fed, range(position, position + len(fed)))
        position += len(fed)
        fed = [int(logits[-1].argmax())]
        text += fed
    return text


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def test_cpp(program, pte):
    out = run(HOSTS / "use_cases", pte)
    tokens = [int(token) for token in out.splitlines()[0].split(":")[1].split()]
    assert tokens == greedy(program, [5, 17, 3, 88, 41, 9], 10)
    assert "refused: the cache kvist:seq does not have the face" in out


def test_rust(program, pte):
    prompt = [5, 17, 3, 88]
    out = run(HOSTS / "host", pte, "f32", *prompt)
    assert [int(line) for line in out.split()] == greedy(program, prompt, 10)
    packed = run(HOSTS / "host", pte, "q8", *prompt)
    assert [int(line) for line in packed.split()] == greedy(program, prompt, 10, torch.uint8, bits=8, group_size=32)
