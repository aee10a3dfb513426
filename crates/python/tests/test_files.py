"""Saved sessions and frozen prefixes: what follows is the same to the bit, or they are refused."""

import gc
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time

import kvist
import numpy as np
import pytest

TEXT = "The borrow checker is a part of the compiler that checks every reference, and it knows how long each one lives."
MORE = " A reference never outlives"
KVS = ["f32", "f16", "q8", "q4", "t4", "t4-o"]
KINDS = [kind for kind in kvist.cache.KINDS if kind != "ring"]


def go_on(session, tokens):
    """The bits of the logits after each token."""
    return np.concatenate([session.forward([token]) for token in tokens]).view(np.uint32)


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_session_goes_on_to_the_bit(model, tmp_path, kind, kv):
    session = model.session(kind=kind, kv=kv, context=512)
    session.generate(TEXT, max_tokens=12, temperature=0).result()
    session.save(tmp_path / "s.kvs")
    resumed = model.resume(tmp_path / "s.kvs", kind=kind)
    assert resumed.tokens == session.tokens and resumed.kind == kind
    packed = kv in ("q8", "q4", "t4", "t4-o")
    assert resumed.cached_tokens == len(session) - 1, "nothing else is computed again"
    tokens = model.encode(MORE, special=False)
    np.testing.assert_array_equal(go_on(resumed, tokens), go_on(session, tokens))
    if not packed:
        # Both are sessions like any other.
        assert resumed.generate(max_tokens=8, seed=5).result() == session.generate(max_tokens=8, seed=5).result()
        fork = model.resume(str(tmp_path / "s.kvs"), kind="cells").fork()
        fork.rollback(-3)
        assert fork.tokens == session.tokens[: len(fork)]


def test_a_saved_session_says_what_it_has(model, tmp_path):
    path = tmp_path / "s.kvs"
    session = model.session()
    session.forward(TEXT)
    messages = [{"role": "user", "content": "Hé?"}, {"role": "assistant", "content": ""}]
    session.save(path, messages=messages)
    saved = kvist.SavedSession(path)
    assert saved.messages == messages and saved.tokens == session.tokens and len(saved) == len(session)
    assert saved.path == path and "s.kvs" in repr(saved) and saved.kind == session.kind
    assert model.resume(saved).tokens == session.tokens
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600, "a text is private"
    for bad in ({"role": "user"}, [{"role": "user"}], [{"role": "tool", "content": "1", "id": "2"}], ["hi"]):
        with pytest.raises(ValueError, match="messages"):
            session.save(path, messages=bad)
    assert kvist.SavedSession(path).messages == messages, "a refused save changes nothing"


def test_branches_and_rings_are_saved(model, tmp_path):
    root = model.session(kv="f16")
    root.forward(TEXT)
    fork = root.fork()
    fork.forward(MORE)
    root.forward(" Something else")
    fork.save(tmp_path / "fork.kvs")
    resumed = model.resume(tmp_path / "fork.kvs")
    assert resumed.tokens == fork.tokens != root.tokens
    np.testing.assert_array_equal(go_on(resumed, [5, 6]), go_on(fork, [5, 6]))
    ring = model.session(kind="ring", window=16, sinks=2, chunk=8, kv="f32")
    ring.generate(TEXT, max_tokens=20, temperature=0).result()
    ring.save(tmp_path / "ring.kvs")
    resumed = model.resume(tmp_path / "ring.kvs", kind="ring", window=16, sinks=2, chunk=8)
    np.testing.assert_array_equal(go_on(resumed, [5, 6]), go_on(ring, [5, 6]))


def test_what_cannot_be_saved(model, tmp_path):
    path = tmp_path / "s.kvs"
    with pytest.raises(kvist.ArgumentError, match="nothing is computed yet"):
        model.session().save(path)
    session = model.session()
    session.forward(TEXT)
    with pytest.raises(kvist.FileError, match="no-such-folder"):
        session.save(tmp_path / "no-such-folder" / "s.kvs")
    with pytest.raises(kvist.FileError):
        session.save(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    full = model.session(context=32)
    full.forward([7] * 32)
    full.save(path)  # its last token leaves the cache, and is computed again
    assert len(model.resume(path)) == 32


def test_a_session_of_something_else_is_refused_by_name(model, tmp_path):
    path = tmp_path / "s.kvs"
    session = model.session(kv="q8")
    session.forward(TEXT)
    session.save(path)
    for options, name in [
        ({"kv": "f16"}, "`kv` q8"),
        ({"kv": "q8", "kv_v": "q4"}, "`kv_v` q8"),
        ({"window": 8}, "`window`"),
        ({"recent": 32}, "`kv_recent`"),
    ]:
        with pytest.raises(kvist.MismatchError, match=name):
            model.resume(path, **options)
    with pytest.raises(kvist.MismatchError, match="weights"):
        kvist.Model(weights="f32").resume(path)
    with pytest.raises(ValueError, match="cache holds"):
        model.resume(path, context=8)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model.resume(path, contxt=8)
    with pytest.raises(kvist.FileError, match="no-such"):
        model.resume(tmp_path / "no-such.kvs")
    with pytest.raises(TypeError):
        model.resume(3)
    assert issubclass(kvist.MismatchError, kvist.FileError) and issubclass(kvist.FileError, kvist.Error)


def other_origin(path, change):
    """Rewrites the header as if the file were whole and made with something else."""
    blake3 = pytest.importorskip("blake3")
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    table = json.loads(data[8 : 8 + n])
    header = json.loads(table["__metadata__"]["kvist"])
    change(header["origin"])
    text = json.dumps(header)
    table["__metadata__"] = {"kvist": text, "blake3": blake3.blake3(text.encode()).hexdigest()}
    new = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + n :])


def test_other_weights_are_refused(model, tmp_path):
    path = tmp_path / "s.kvs"
    session = model.session()
    session.forward(TEXT)
    session.save(path)
    other_origin(path, lambda origin: origin["model"].update(weights="0" * 64))
    kvist.SavedSession(path)  # whole, but of another model
    with pytest.raises(kvist.MismatchError, match="weights"):
        model.resume(path)


@pytest.mark.parametrize("what", ["session", "prefix"])
def test_changed_and_torn_files_are_refused(model, tmp_path, what):
    path = tmp_path / "file"
    if what == "session":
        session = model.session(kv="q8")
        session.forward(TEXT)
        session.save(path)
        uses = [kvist.SavedSession, model.resume]
    else:
        model.freeze_prefix(TEXT, path, kv="q8")
        uses = [kvist.Prefix, lambda path: model.session(prefix=path), lambda path: kvist.Batch(model, prefix=path)]
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    random = np.random.default_rng(7)
    for i in range(40):
        broken = bytearray(whole)
        broken[random.integers(header if i % 2 else len(whole))] ^= 1 << random.integers(8)
        path.write_bytes(bytes(broken))
        with pytest.raises(kvist.FileError, match="file"):
            uses[i % len(uses)](path)
        path.write_bytes(whole[: random.integers(len(whole))])
        with pytest.raises(kvist.FileError):
            uses[i % len(uses)](path)
    for content in (b"", b"{}", whole + b"more"):
        path.write_bytes(content)
        for use in uses:
            with pytest.raises(kvist.FileError):
                use(path)
    with pytest.raises(kvist.FileError, match="missing"):
        uses[0](tmp_path / "missing")
    path.write_bytes(whole)
    uses[1](path)


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_begins_with_a_prefix_to_the_bit(model, tmp_path, kind, kv):
    prefix = model.freeze_prefix(TEXT, tmp_path / "p.kvp", kv=kv)
    tokens = model.encode(TEXT)
    assert prefix.tokens == tokens and len(prefix) == len(tokens) and prefix.system is None
    assert prefix.nbytes == (tmp_path / "p.kvp").stat().st_size and "p.kvp" in repr(prefix)
    session = model.session(kind=kind, prefix=prefix)
    assert session.tokens == tokens
    assert session.cached_tokens == len(tokens)
    assert session.kv_bytes == 0, "nothing was copied"
    alone = model.session(kind=kind, kv=kv)
    alone.forward(TEXT)
    more = model.encode(MORE, special=False)
    np.testing.assert_array_equal(go_on(session, more), go_on(alone, more))
    session.rollback(3)
    alone.rollback(3)
    np.testing.assert_array_equal(go_on(session, more), go_on(alone, more))
    # The file is as it was.
    again = model.session(kind=kind, prefix=str(tmp_path / "p.kvp"))
    text = again.generate(MORE, max_tokens=8, temperature=0).result()
    alone.rollback(0)
    assert alone.generate(tokens + more, max_tokens=8, temperature=0).result() == text


def mapped(name):
    """How often this process maps the memory of a shared prefix; `None` where the system does not say so."""
    if sys.platform != "linux":
        return None
    with open("/proc/self/maps") as maps:
        return sum(line.endswith(f"/memfd:{name} (deleted)\n") for line in maps)


@pytest.mark.parametrize("kv", KVS)
def test_sessions_share_a_prefix_without_a_file(model, kv):
    prefix = model.share_prefix(TEXT, kv=kv)
    tokens, more = model.encode(TEXT), model.encode(MORE, special=False)
    assert prefix.tokens == tokens and prefix.path is None and prefix.system is None and prefix.nbytes > 0
    name = re.search(r'"(shared prefix \d+)", \d+ tokens', repr(prefix)).group(1)
    alone = model.session(kind="cells", kv=kv)
    alone.forward(TEXT)
    expected = go_on(alone, more)
    sessions = [model.session(kind=kind, prefix=prefix) for kind in KINDS]
    assert all(it.tokens == tokens and it.kv_bytes == 0 for it in sessions), "nothing was computed or copied"
    assert mapped(name) in (len(sessions), None)
    del prefix
    for session in sessions:
        np.testing.assert_array_equal(go_on(session, more), expected)
    del session
    sessions[0].rollback(3)
    sessions.pop(), sessions.pop(0)
    gc.collect()
    assert mapped(name) in (len(sessions), None)
    sessions.clear()
    gc.collect()
    assert mapped(name) in (0, None), "its memory is free"


def test_a_shared_prefix_of_something_else_is_refused(model):
    prefix = model.share_prefix(TEXT, kv="f16")
    for options, name in [({"kv": "q8"}, "`kv` f16"), ({"window": 9}, "`window`")]:
        with pytest.raises(kvist.MismatchError, match=f"shared prefix .*{name}"):
            model.session(prefix=prefix, **options)
        with pytest.raises(kvist.MismatchError, match=name):
            kvist.Batch(model, prefix=prefix, **options)
    with pytest.raises(kvist.MismatchError, match="weights"):
        kvist.Model(weights="f32").session(prefix=prefix)
    with pytest.raises(ValueError, match="chat template"):
        model.share_prefix(TEXT, system=True)
    with pytest.raises(ValueError, match="no tokens"):
        model.share_prefix([])
    with pytest.raises(ValueError, match="vocabulary"):
        model.share_prefix([10**7])
    with pytest.raises(TypeError, match="unexpected keyword"):
        model.share_prefix(TEXT, contxt=8)


def test_a_shared_prefix_is_in_the_budget(tmp_path):
    """The least memory that computes a prefix into a file has no room for one in memory."""

    def fits(memory, use):
        try:
            use(kvist.Model(memory=memory))
            return True
        except kvist.OutOfMemory:
            return False

    def least(use):
        too_little, enough = 0, 1 << 30
        while enough - too_little > 1024:
            half = (too_little + enough) // 2
            too_little, enough = (too_little, half) if fits(half, use) else (half, enough)
        return enough

    tokens = [5 + i for i in range(200)]
    in_file = least(lambda model: model.freeze_prefix(tokens, tmp_path / "p.kvp"))
    in_memory = least(lambda model: model.share_prefix(tokens))
    nbytes = kvist.Prefix(tmp_path / "p.kvp").nbytes
    assert nbytes - 1024 < in_memory - in_file < nbytes + (64 << 10)


def test_batches_share_a_prefix_without_a_file(model):
    prefix = model.share_prefix(TEXT, kv="f32")
    expected = model.generate(TEXT + MORE, max_tokens=8, temperature=0, kv="f32").result()
    with kvist.Batch(model, context=512, prefix=prefix) as a, kvist.Batch(model, context=512, prefix=prefix) as b:
        for batch in (a, b):
            generation = batch.submit(TEXT + MORE, max_tokens=8, temperature=0)
            assert generation.result() == expected
            assert generation.cached_tokens >= len(prefix) // 16 * 16, "from the first request on"


def test_a_prefix_of_something_else_is_refused(model, tmp_path):
    path = tmp_path / "p.kvp"
    prefix = model.freeze_prefix(TEXT, path, kv="f16")
    for options, name in [({"kv": "q8"}, "`kv` f16"), ({"window": 9}, "`window`")]:
        with pytest.raises(kvist.MismatchError, match=name):
            model.session(prefix=prefix, **options)
        with pytest.raises(kvist.MismatchError, match=name):
            kvist.Batch(model, prefix=prefix, **options)
    with pytest.raises(kvist.MismatchError, match="weights"):
        kvist.Model(weights="f32").session(prefix=prefix)
    with pytest.raises(ValueError, match="cache holds"):
        model.session(prefix=prefix, context=8)
    with pytest.raises(ValueError, match="chat template"):
        model.freeze_prefix(TEXT, path, system=True)
    with pytest.raises(ValueError, match="no tokens"):
        model.freeze_prefix([], path)
    with pytest.raises(ValueError, match="vocabulary"):
        model.freeze_prefix([10**7], path)
    with pytest.raises(kvist.FileError, match="no-such-folder"):
        model.freeze_prefix(TEXT, tmp_path / "no-such-folder" / "p.kvp")
    session = model.session(kv="f16")
    session.forward(TEXT)
    session.save(tmp_path / "s.kvs")
    with pytest.raises(kvist.FileError, match="no prefix"):
        model.session(prefix=tmp_path / "s.kvs")
    with pytest.raises(kvist.FileError, match="no session"):
        model.resume(path)
    assert kvist.Prefix(path).tokens == prefix.tokens, "it is as it was"


def test_a_batch_begins_with_a_prefix(model, tmp_path):
    prefix = model.freeze_prefix(TEXT, tmp_path / "p.kvp", kv="f32")
    n = len(prefix) // 16 * 16
    with kvist.Batch(model, context=1024, prefix=prefix) as batch:
        generation = batch.submit(TEXT + MORE, max_tokens=8, temperature=0)
        assert generation.result() == model.generate(TEXT + MORE, max_tokens=8, temperature=0, kv="f32").result()
        assert generation.cached_tokens >= n, "from the first request on"
    with pytest.raises(kvist.ArgumentError, match="prefix index"):
        kvist.Batch(model, prefix=prefix, prefix_cache=False)


READER = """
import sys, kvist
model = kvist.Model(deterministic=True)
session = model.session(prefix=sys.argv[1])
logits = session.forward(sys.argv[2])
print(session.kv_bytes, logits.tobytes().hex(), flush=True)
sys.stdin.readline()
"""


def test_two_processes_share_a_prefix(model, tmp_path):
    """Both attend the same pages of the file, and none computes or copies the prefix."""
    prefix = model.freeze_prefix(TEXT * 8, tmp_path / "p.kvp", kv="f32", chunk=64)
    command = [sys.executable, "-c", READER, str(prefix.path), MORE]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        lines = [process.stdout.readline().split() for process in both]
        if sys.platform == "linux":
            maps = [open(f"/proc/{process.pid}/maps").read() for process in both]
            assert all("p.kvp" in text for text in maps), "both have the file mapped"
    finally:
        for process in both:
            process.communicate("\n")
    alone = model.session(kv="f32", chunk=64)
    alone.forward(TEXT * 8)
    expected = alone.forward(model.encode(MORE, special=False)).tobytes().hex()
    for kv_bytes, logits in lines:
        assert logits == expected
        assert int(kv_bytes) < prefix.nbytes, "its own are the pages behind the prefix"


def test_another_process_resumes_what_this_one_saved(model, tmp_path):
    session = model.session(kv="f32")
    session.forward(TEXT)
    session.save(tmp_path / "s.kvs")
    code = READER.replace("session(prefix=", "resume(")
    command = [sys.executable, "-c", code, str(tmp_path / "s.kvs"), MORE]
    done = subprocess.run(command, input="\n", stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split()[1] == session.forward(MORE).tobytes().hex()


def test_the_program_reads_what_python_wrote(model, tmp_path):
    session = model.session(kv="f32")
    session.forward(TEXT)
    session.save(tmp_path / "s.kvs")
    model.freeze_prefix(TEXT, tmp_path / "p.kvp", kv="f32")
    program = [sys.executable, "-m", "kvist", "run", "--raw", "--kv", "f32", "--json", "-n", "4", "--temperature", "0"]
    for option in (["--resume", "s.kvs"], ["--prefix", "p.kvp"]):
        done = subprocess.run([*program, *option, MORE], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
        assert json.loads(done.stdout)["resumed_tokens"] >= len(session) - 1, option
    done = subprocess.run([*program, "--save-session", "t.kvs", TEXT], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert model.resume(tmp_path / "t.kvs").tokens[: len(session)] == session.tokens


def test_threads_that_save_the_same_file_leave_one_of_theirs(model, tmp_path):
    path = tmp_path / "s.kvs"
    sessions = []
    for i in range(4):
        sessions.append(model.session())
        sessions[-1].forward([10 + i] * (40 + i))

    def work(session):
        for _ in range(8):
            session.save(path)

    threads = [threading.Thread(target=work, args=(session,)) for session in sessions]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert kvist.SavedSession(path).tokens in [session.tokens for session in sessions]
    assert [it.name for it in tmp_path.iterdir()] == ["s.kvs"]


def test_files_of_a_model_on_a_disk(tmp_path):
    """A model that was mapped, and one that was read: the same hashes."""
    folder = os.path.join(os.path.dirname(__file__), "../../model/tests/fixtures/parity/qwen3")
    if not os.path.isdir(folder):
        pytest.skip("no fixture")
    shutil.copytree(folder, tmp_path / "model")
    mapped, read = (kvist.Model(tmp_path / "model", mmap=mmap) for mmap in (True, False))
    session = read.session(context=64)
    session.forward([5] * 20)
    session.save(tmp_path / "s.kvs")
    np.testing.assert_array_equal(go_on(mapped.resume(tmp_path / "s.kvs"), [3]), go_on(session, [3]))


WRITER = """
import sys, kvist
model = kvist.Model(deterministic=True)
sessions = [model.session(kv="f32") for _ in range(2)]
for i, session in enumerate(sessions):
    session.forward([5 + i] * (60 + i))
print("ready", flush=True)
while True:
    for session in sessions:
        session.save(sys.argv[1])
"""


def test_a_kill_in_mid_write_leaves_the_old_or_the_new_session(tmp_path):
    """KVIST_KILLS=1000 kills more often."""
    path, random = tmp_path / "s.kvs", np.random.default_rng(3)
    texts = [[5] * 60, [6] * 61]
    partial = 0
    for kill in range(int(os.environ.get("KVIST_KILLS", "3"))):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        while not path.exists():
            time.sleep(0.001)
        time.sleep(random.random() * 0.02)  # any moment is right
        writer.kill()
        writer.communicate()
        assert kvist.SavedSession(path).tokens in texts, f"kill {kill}"
        left = [it for it in tmp_path.iterdir() if it != path]
        assert all(it.name.endswith(".partial") for it in left)
        partial += len(left)
        [it.unlink() for it in left]
    print(f"{partial} of the kills were in mid-write")
