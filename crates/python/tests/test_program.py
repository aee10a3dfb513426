"""The program, as pip installs it."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import kvist
import pytest

MODULE = [sys.executable, "-m", "kvist"]


def run(*arguments, **options):
    return subprocess.run([*MODULE, *arguments], capture_output=True, text=True, timeout=600, **options)


def test_it_runs_and_says_its_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"kvist {kvist.__version__}\n")
    done = run("run", "The borrow checker", "-n", "4", "--greedy", "--no-echo", "-q")
    text = kvist.Model().generate("The borrow checker", max_tokens=4, temperature=0).result()
    assert done.stdout.rstrip("\n") == text, done.stderr


def test_the_script_is_the_same_program():
    script = shutil.which("kvist", path=str(pathlib.Path(sys.executable).parent))
    assert script, "pip installs it beside Python"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, f"kvist {kvist.__version__}\n")


def test_exit_codes_are_kept():
    assert run("--help").returncode == 0
    wrong = run("run", "--no-such-flag")
    assert wrong.returncode == 2 and "--no-such-flag" in wrong.stderr and "Traceback" not in wrong.stderr
    failed = run("run", "--model", "/no-such-model", "x")
    assert failed.returncode == 1 and "/no-such-model" in failed.stderr
    assert run("run", "--temperature", "-1", "x").returncode == 2


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_ctrl_c_ends_it():
    """While it computes, Ctrl-C ends the text, with the summary; a second one would end the program."""
    arguments = ["run", "The", "-n", "100000", "--ignore-eos", "--context", "100001"]
    with subprocess.Popen([*MODULE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 0 and b"tokens" in errors and b"Traceback" not in errors


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_ctrl_c_ends_a_python_program():
    # A shell starts background programs with SIGINT ignored.
    program = """
import kvist, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
session = kvist.Model().session(context=100_000)
try:
    for piece in session.generate("The", max_tokens=90_000, ignore_eos=True):
        print(piece, end="", flush=True)
except KeyboardInterrupt:
    n = len(session)
    session.generate(max_tokens=2, ignore_eos=True).result()
    print("\\ninterrupted", len(session) - n)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and out.endswith(b"interrupted 2\n")
