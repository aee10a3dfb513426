"""What is dropped is freed: memory stays flat. Each test is a process of its own, because in one where other tests have run the memory
that they have freed and the system's files come and go."""

import gc
import subprocess
import sys

import kvist
import pytest
from kvist import cache

N = 10_000
# A leak of one object for each round would be larger: a session's cache alone takes kilobytes.
SLACK = 8 << 20


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def grown(work):
    """Bytes by which memory grows over the last nine tenths of `N` rounds."""
    for i in range(N // 10):
        work(i)
    gc.collect()
    before = resident_bytes()
    for i in range(N // 10, N):
        work(i)
    gc.collect()
    return resident_bytes() - before


def sessions():
    model = kvist.Model(threads=1)

    def work(i):
        session = model.session(context=64)
        logits = session.forward([i % 1000])
        fork = session.fork()
        if i % 50 == 0:
            generation = fork.generate([5], max_tokens=3)
            next(generation, None)  # and left
        del logits, session

    return grown(work)


def drafts():
    model = kvist.Model(threads=1)
    kept = model.session(context=128, speculate="suffix")
    small = kvist.Model(threads=1)  # weights that are loaded again and again beside others leave parts of pages in their slab
    drafters = [{"speculate": mode} for mode in ("suffix", "ngram", "auto")] + [{"speculate": "draft", "draft_model": small}]

    def work(i):
        if i % 10 == 0:
            session = model.session(context=128, draft_tokens=4, **drafters[i // 10 % 4])
            next(session.generate([5, 6, 7, 5, 6, 7], max_tokens=3, ignore_eos=True), None)  # and left
            del session
        fork = kept.fork()
        fork.forward([i % 1000])
        del fork  # drafters forget it, and learn a bounded number of tokens

    return grown(work)


def steps():
    blocks = cache.Paged(capacity=1024, block_tokens=16)
    blocks.open(1, [1])
    with blocks.begin([(1, 100)]) as step:
        step.commit()

    def work(i):
        made = cache.Cache("cells", 128)
        made.new_sequence(1)
        left = made.begin([(1, 4)])
        with blocks.begin([(1, 3)]) as step:
            step.slots, step.block_tables(), step.mask()
        del left, made

    return grown(work)


CASES = {"sessions": sessions, "drafts": drafts, "steps": steps}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", CASES)
def test_memory_stays_flat(name):
    ran = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < SLACK


if __name__ == "__main__":
    print(CASES[sys.argv[1]]())
