"""The op kvcache::update_and_attend over kvist's caches: eager, compiled, exported, and beside kvist's own engine. Needs torch and
transformers."""

import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvist  # noqa: E402
import kvist.torch  # noqa: E402

TEXT = [5, 17, 3, 88, 41, 9, 60, 22, 75, 13, 2, 34]


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model(llama):
    return kvist.torch.Exportable(llama)


@pytest.fixture(scope="module")
def expected(llama, tmp_path_factory):
    """The logits of every token of TEXT, by kvist's own engine from the saved model."""
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    session = kvist.Model(folder).session(kv="f32", max_rows=len(TEXT))
    return torch.from_numpy(session.forward(TEXT, rows="all").copy())


def step(model, cache, tokens, start, seqs=None):
    positions = torch.tensor(start if isinstance(start, list) else range(start, start + len(tokens))).view(-1, 1)
    with torch.no_grad(), cache:
        if seqs:
            cache.begin_step(seqs)
        return model(torch.tensor([tokens]), positions, torch.arange(len(tokens)))[0]


def in_chunks(model, cache, chunks):
    rows, start = [], 0
    for n in chunks:
        rows.append(step(model, cache, TEXT[start : start + n], start))
        start += n
    return torch.cat(rows)


def close(found, expected, tolerance=1e-4):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def cache_of(model, **options):
    return kvist.torch.Cache.of(model.config, **{"kv": "f32", **options})


def exported(model):
    n, rows = torch.export.Dim("n", min=1, max=64), torch.export.Dim("rows", min=1, max=64)
    inputs = (torch.zeros(1, 3, dtype=torch.long), torch.arange(3).view(-1, 1), torch.tensor([1, 2]))
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=({1: n}, {0: n}, {0: rows}))


@pytest.mark.parametrize("kind", ["cells", "paged"])
def test_eager(model, expected, kind):
    cache = cache_of(model, kind=kind)
    close(in_chunks(model, cache, [7, 1, 3, 1]), expected)
    assert cache.seq_len() == len(TEXT) and cache.kv_bytes > 0


def test_exported(model, expected):
    program = exported(model)
    calls = [node for node in program.graph.nodes if "update_and_attend" in str(node.target)]
    assert [node.args[4] for node in calls] == [0, 1, 2], "a call for each layer, whose number is a constant"
    close(in_chunks(program.module(), cache_of(model), [7, 1, 3, 1]), expected)


def test_a_saved_program_runs_with_another_cache(model, expected, tmp_path):
    torch.export.save(exported(model), tmp_path / "llama.pt2")
    loaded = torch.export.load(tmp_path / "llama.pt2").module()
    close(in_chunks(loaded, cache_of(model, kind="paged"), [12]), expected)
    packed = in_chunks(loaded, cache_of(model, kv="q8"), [12])
    off = (packed - expected).abs().max() / expected.abs().max()
    assert 1e-6 < off < 0.1, off


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(model, expected, backend):
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    close(in_chunks(compiled, cache_of(model), [7, 1, 3, 1]), expected)


def test_sequences_in_one_pass(model, expected):
    cache = cache_of(model)
    step(model, cache, TEXT[:4], 0, seqs=[0] * 4)
    cache.seq_cp(0, 7)
    # Two sequences, their tokens interleaved: 0 goes on with TEXT, 7 with another token first.
    found = step(model, cache, [TEXT[4], 50, TEXT[5], TEXT[5]], [4, 4, 5, 5], seqs=[0, 7, 0, 7])
    close(found[[0, 2]], expected[4:6])
    alone = cache_of(model)
    close(found[[1, 3]], step(model, alone, TEXT[:4] + [50, TEXT[5]], 0)[4:])
    cache.seq_rm(7)
    assert cache.seq_len(7) == 0 and cache.seq_len(0) == 6
    cache.rewind(5)
    close(step(model, cache, TEXT[5:], 5), expected[5:])


def test_a_batch_of_sequences(model):
    """Rows of the batch are sequences of their own, where the op is called directly."""
    torch.manual_seed(1)
    cache = kvist.torch.Cache(1, 4, 2, 16, kv="f32", windows=3)
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    with cache:
        found = torch.ops.kvcache.update_and_attend(q, k, v, torch.arange(5).view(-1, 1), 0, 0.25, torch.float64)
    seen = torch.ones(5, 5, dtype=torch.bool).tril() & ~torch.ones(5, 5, dtype=torch.bool).tril(-3)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    close(found, sdpa(q, k, v, attn_mask=seen, scale=0.25, enable_gqa=True).double(), 1e-5)


def test_the_fake_kernel():
    arguments = (torch.randn(1, 4, 2, 16), torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16), torch.arange(2).view(-1, 1), 0, 0.25)
    with kvist.torch.Cache(1, 4, 2, 16):
        real = torch.ops.kvcache.update_and_attend(*arguments, torch.bfloat16)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(it) if isinstance(it, torch.Tensor) else it for it in arguments]
        out = torch.ops.kvcache.update_and_attend(*fake, torch.bfloat16)
    assert out.shape == real.shape and out.dtype == real.dtype and out.stride() == real.stride()


def test_what_is_refused(model):
    cache = cache_of(model)
    step(model, cache, TEXT[:4], 0)
    for start in (3, 5):
        with pytest.raises(ValueError, match="continues at position 4"):
            step(model, cache, TEXT[4:6], start)
    with pytest.raises(ValueError, match="declared 3 tokens, and the pass has 2"):
        step(model, cache, TEXT[4:6], 4, seqs=[0] * 3)
    with pytest.raises(ValueError, match="rewind"):
        cache.rewind(5)
    with pytest.raises(ValueError, match="windows has 2 entries"):
        kvist.torch.Cache(3, 4, 2, 16, windows=[None, 4])
    op, rows, positions = torch.ops.kvcache.update_and_attend, torch.zeros(1, 4, 1, 16), torch.tensor([[4]])
    kv = torch.zeros(1, 2, 1, 16)
    with pytest.raises(ValueError, match="without a cache"):
        op(rows, kv, kv, positions, 0, 0.25, torch.float32)
    with cache:
        with pytest.raises(ValueError, match="layer 1 without layer 0"):
            op(rows, kv, kv, positions, 1, 0.25, torch.float32)
        with pytest.raises(ValueError, match="one position per token"):
            op(rows, kv, kv, torch.zeros(1, 2, dtype=torch.long), 0, 0.25, torch.float32)
        with pytest.raises(ValueError, match="float64"):
            op(rows.double(), kv, kv, positions, 0, 0.25, torch.float32)
        op(rows, kv, kv, positions, 0, 0.25, torch.float32)  # a pass that stops after its first layer
    assert cache.seq_len() == 4
    step(model, cache, TEXT[4:6], 4)
    assert cache.seq_len() == 6


def test_beside_executorchs_reference_cache():
    """Where the package executorch is installed: its caches still work behind the op, and give the same."""
    reference = pytest.importorskip("executorch.extension.llm.cache.reference_cache")
    from executorch.extension.llm.cache.update_and_attend import REGISTRY

    config = reference.CacheConfig(n_layers=1, n_kv_heads=2, head_dim=16, capacity=32)
    REGISTRY.install("reference", reference.ContiguousReferenceCache(config))
    cache = kvist.torch.Cache(1, 4, 2, 16, kv="f32")
    torch.manual_seed(2)
    try:
        for start, n in [(0, 5), (5, 1), (6, 3)]:
            q, k, v = torch.randn(1, 4, n, 16), torch.randn(1, 2, n, 16), torch.randn(1, 2, n, 16)
            arguments = (q, k, v, torch.arange(start, start + n).view(-1, 1), 0, 0.25, torch.float32)
            with REGISTRY.active("reference"):
                expected = torch.ops.kvcache.update_and_attend(*arguments)
            with cache:
                close(torch.ops.kvcache.update_and_attend(*arguments), expected, 1e-5)
    finally:
        REGISTRY.uninstall("reference")


def test_executorchs_definition_and_ours_do_not_clash():
    """In processes of their own, in both orders."""
    pytest.importorskip("executorch.extension.llm.cache.update_and_attend")
    theirs = "import executorch.extension.llm.cache.update_and_attend as theirs"
    for code in (f"{theirs}; import kvist.torch", f"import kvist.torch; {theirs}"):
        code += "; assert kvist.torch.update_and_attend is theirs.update_and_attend"
        subprocess.run([sys.executable, "-c", code], check=True)


def test_the_packages_import_in_any_order_and_executorch_is_asked_for_when_used():
    """In a process of its own. Without the package executorch its functions say what is missing."""
    code = """
import kvist.executorch as ke, kvist.torch, torch, importlib.util
assert torch.ops.kvcache.update_and_attend
if importlib.util.find_spec("executorch") is None:
    try:
        ke.export_module(None, (), (), "x", n_layers=1, n_kv_heads=1, head_dim=1)
    except ImportError as why:
        assert "pip install executorch==" in str(why), why
    else:
        raise SystemExit("it was not refused")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
