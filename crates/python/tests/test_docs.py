"""The Python lines of the guides and the example run as they are written."""

import ast
import inspect
import pathlib
import re
import runpy

import kvist
import pytest
from kvist import _native

ROOT = pathlib.Path(__file__).resolve().parents[3]
CRATE = pathlib.Path(__file__).resolve().parents[1]


def blocks(file):
    text = file.read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if "kvist" in block or "session" in block or "batch" in block]


@pytest.mark.parametrize("file", [ROOT / "docs" / "python.md", CRATE / "README.md"])
def test_the_lines_of_a_guide_run(file, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some of them write files
    scope = {}
    n = 0
    for block in blocks(file):
        if '"./Qwen3' in block or "kvist.simulate" in block and not has_pandas():
            continue  # needs a model that is not here, or pandas
        exec(compile(block, f"{file.name}, block {n}", "exec"), scope)
        n += 1
    assert n >= 1 and capsys.readouterr().out


def has_pandas():
    try:
        import pandas  # noqa: F401
    except ImportError:
        return False
    return True


def test_the_toy_engine_runs(capsys):
    runpy.run_path(str(CRATE / "examples" / "toy_engine.py"), run_name="__main__")
    assert "5 requests" in capsys.readouterr().out


def test_every_public_name_has_a_docstring():
    for module in (kvist, kvist.cache):
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing):
                continue
            assert thing.__doc__, name
            if isinstance(thing, type):
                public = [it for it in vars(thing) if not it.startswith("_")]
                missing = [it for it in public if not getattr(thing, it).__doc__]
                assert not missing or issubclass(thing, BaseException), (name, missing)


def test_the_stub_has_what_the_module_has():
    """Every public name of every class, and the parameters that `_native.pyi` names one by one."""
    stub = ast.parse((pathlib.Path(kvist.__file__).parent / "_native.pyi").read_text(encoding="utf-8"))
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    compared = 0
    for name, thing in vars(_native).items():
        if not isinstance(thing, type):
            continue
        body = classes[name].body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        fields = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
        public = {it for it in vars(thing) if not it.startswith("_")}
        assert {it for it in functions if not it.startswith("_")} | fields == public, name
        for function in public & functions.keys():
            if not callable(getattr(thing, function)) or functions[function].decorator_list:
                continue
            arguments = functions[function].args
            named = {it.arg for it in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            there = inspect.signature(getattr(thing, function)).parameters
            assert named <= there.keys() | {"self"}, (name, function)
            if arguments.kwarg is None:
                assert there.keys() - named == set(), (name, function)
            compared += 1
    assert compared > 40
