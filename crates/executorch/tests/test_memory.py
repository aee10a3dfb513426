"""32,768 tokens of context: memory follows the tokens held, and no step copies what is stored."""

import torch

import kvist.executorch as ke

TOKENS, CHUNK, HEADS, DIM = 32768, 512, 2, 64


class OneCall(torch.nn.Module):
    def forward(self, q, k, v, position):
        return torch.ops.kvcache.update_and_attend(q, k, v, position, 0, DIM**-0.5, torch.float32)


def kib(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


def test_memory_follows_the_tokens(tmp_path):
    n = torch.export.Dim("n", min=1, max=CHUNK)
    shape = lambda n: (1, HEADS, n, DIM)  # noqa: E731
    inputs = (torch.zeros(shape(3)),) * 3 + (torch.arange(3).unsqueeze(-1),)
    ke.export_module(
        OneCall(), inputs, ({2: n}, {2: n}, {2: n}, {0: n}), tmp_path / "op.pte", n_layers=1, n_kv_heads=HEADS, head_dim=DIM, xnnpack=False
    )
    program = ke.Program(tmp_path / "op.pte")
    config = ke.make_config(program.cache_params, 1 << 20, torch.float32, max_step_tokens=CHUNK, threads=1)
    session = ke.make_decode_session("kvist", config)

    def step(start, n):
        torch.manual_seed(start)
        rows = torch.randn(shape(n))
        program.execute(session, (rows, rows, rows, torch.arange(start, start + n).unsqueeze(-1)))

    step(0, CHUNK)
    before = kib("VmRSS")
    for start in range(CHUNK, TOKENS - 64, CHUNK // 8 * 8):
        step(start, min(CHUNK, TOKENS - 64 - start))
    stored = TOKENS * 2 * HEADS * DIM * 4 // 1024
    grown = kib("VmRSS") - before
    assert grown < 1.25 * stored + 4096, f"{grown} KiB for {stored} KiB of K and V; the capacity is 32 times as much"
    # A copy of the pool in a step would show in the peak, which the kernel resets here.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    held = kib("VmRSS")
    print(f"\n{TOKENS - 64} tokens: {grown} KiB resident for {stored} KiB of K and V, of {stored * 32} KiB of capacity")
    for position in range(TOKENS - 64, TOKENS - 32):
        step(position, 1)
    more = kib("VmHWM") - held
    print(f"32 steps at {TOKENS} tokens: the peak is {more} KiB above that")
    assert more < stored // 4, f"a step took {more} KiB beside {stored} KiB of K and V"
