"""kvist as other programs meet it: its commands and its server."""
import importlib.util
import json
import pathlib
import subprocess
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _module_of_clients(name):
    """By its path: the folder as a whole would hide packages behind files of the same name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/clients/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


server = _module_of_clients("server")
KVIST, Server = server.KVIST, server.Server


class Failed(Exception):
    """kvist ended with an error; its text is what kvist said."""


def run(*args):
    done = subprocess.run([KVIST, *map(str, args)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(done.stderr.strip())
    return done.stdout


def logits_of(model, tokens, *args):
    """Behind every token: `[tokens, n_vocab]`."""
    with tempfile.TemporaryDirectory() as folder:
        out, ids = pathlib.Path(folder, "logits.safetensors"), pathlib.Path(folder, "ids")
        ids.write_text(",".join(map(str, tokens)))
        run("logits", "--model", model, "--tokens-file", ids, "--out", out, "--quiet", *args)
        with open(out, "rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            return np.fromfile(file, "<f4").reshape(head["logits"]["shape"])


def greedy(model, tokens, n, *args):
    """The next `n` tokens, ends of text included."""
    ids = ",".join(map(str, tokens))
    return json.loads(run("logits", "--model", model, "--tokens", ids, "--generate", n, "--json", *args))["generated"]
