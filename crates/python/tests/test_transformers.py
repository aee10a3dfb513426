"""transformers' models over kvist's cache and attention, compared with its own DynamicCache. Needs torch and transformers."""

import gc

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvist.transformers import KvistCache  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

SIZES = dict(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=12),
}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request):
    """A random model, with SDPA and with kvist's attention."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(FAMILIES[request.param](), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(3)  # so that attention decides
    ours = AutoModelForCausalLM.from_config(FAMILIES[request.param](), attn_implementation="kvist").eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(batch, length=20, seed=1):
    """Prompts of different lengths, padded on the left."""
    torch.manual_seed(seed)
    ids = torch.randint(2, 199, (batch, length))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        ids[row, : 3 * row], mask[row, : 3 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def go_on(model, cache, tokens, n):
    """Continues tokens of which none is padding, whatever their ids are."""
    mask = torch.ones_like(tokens)
    return model.generate(tokens, attention_mask=mask, past_key_values=cache, max_new_tokens=n, do_sample=False)


def generate(model, cache, batch, **options):
    asked = {"max_new_tokens": 24, "do_sample": False, **options}
    return model.generate(**inputs(batch), past_key_values=cache, **asked)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ["cells", "paged"])
def test_the_same_tokens(models, batch, beams, kind):
    theirs, ours = models
    expected = generate(theirs, DynamicCache(config=theirs.config), batch, num_beams=beams)
    cache = KvistCache(ours.config, kv="f32", kind=kind)
    assert torch.equal(generate(ours, cache, batch, num_beams=beams), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1 and cache.batch_size == batch * beams


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("beams", [1, 3])
def test_the_same_tokens_with_the_models_own_attention(models, attention, batch, beams):
    """The cache alone: the model attends to K and V that the cache decodes."""
    theirs, _ = models
    theirs.set_attn_implementation(attention)
    try:
        expected = generate(theirs, DynamicCache(config=theirs.config), batch, num_beams=beams)
        cache = KvistCache(theirs.config, kv="f32")
        assert torch.equal(generate(theirs, cache, batch, num_beams=beams), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1 and cache.batch_size == batch * beams
        if batch == beams == 1:
            fork = cache.fork()
            fork.crop(-10)
            assert torch.equal(go_on(theirs, fork, expected[:, :-10], 10), expected)
            assistant = AutoModelForCausalLM.from_config(theirs.config, attn_implementation="sdpa").eval()
            asked = KvistCache(theirs.config, kv="f32")
            assert torch.equal(generate(theirs, asked, 1, assistant_model=assistant), expected)
            chunks = KvistCache(theirs.config, kv="f32")
            assert torch.equal(generate(theirs, chunks, 1, prefill_chunk_size=7), expected)
    finally:
        theirs.set_attn_implementation("sdpa")


def test_packed_k_and_v_with_the_models_own_attention(models):
    """What comes back is what was stored: bf16 rounds K and V as a bf16 tensor does, q8 a little more."""
    theirs, _ = models
    ids = inputs(1)["input_ids"]
    logits = {}
    for kv in ("f32", "bf16", "q8"):
        cache = KvistCache(theirs.config, kv=kv)
        with torch.no_grad():
            theirs(ids[:, :-1], past_key_values=cache)
            logits[kv] = theirs(ids[:, -1:], past_key_values=cache).logits
    scale = logits["f32"].abs().max()
    for kv in ("bf16", "q8"):
        off = (logits[kv] - logits["f32"]).abs().max() / scale
        assert 0 < off < 0.15, (kv, off)


def test_the_two_ways_are_not_mixed(models):
    theirs, _ = models
    cache = KvistCache(theirs.config, kv="f32")
    ids = inputs(1)["input_ids"]
    with torch.no_grad():
        theirs(ids, past_key_values=cache)
        theirs.set_attn_implementation("kvist")
        try:
            with pytest.raises(ValueError, match="attention of the model changed"):
                theirs(ids, past_key_values=cache)
            cache.reset()
            theirs(ids, past_key_values=cache)
        finally:
            theirs.set_attn_implementation("sdpa")


def test_the_same_logits_in_every_dtype(models):
    theirs, ours = models
    asked = inputs(3)
    with torch.no_grad():
        expected = theirs(**asked).logits
        got = ours(**asked, past_key_values=KvistCache(ours.config, kv="f32")).logits
        real = asked["attention_mask"].bool()
        torch.testing.assert_close(got[real], expected[real], atol=1e-3, rtol=1e-3)
        for dtype, kv in [(torch.bfloat16, "bf16"), (torch.float16, "f16")]:
            half = type(ours)(ours.config).eval()
            half.load_state_dict(ours.state_dict())
            half.to(dtype)
            got = half(**asked, past_key_values=KvistCache(half.config, kv=kv)).logits
            assert got.dtype == dtype and torch.isfinite(got[real]).all()


def test_crop_fork_and_reset(models):
    _, ours = models
    cache = KvistCache(ours.config, kv="f32")
    whole = generate(ours, cache, 1)
    fork, before = cache.fork(), cache.kv_bytes
    assert fork.get_seq_length() == cache.get_seq_length() and cache.kv_bytes == before
    fork.crop(-10)
    assert torch.equal(go_on(ours, fork, whole[:, :-10], 10), whole)
    assert cache.get_seq_length() == whole.shape[1] - 1, "the fork's tokens are its own"
    cache.crop(0)
    for wrong in (1, -1000):
        with pytest.raises(ValueError, match="crop"):
            cache.crop(wrong)
    cache.reset()
    assert cache.get_seq_length() == 0 and torch.equal(generate(ours, cache, 1), whole)
    del fork
    gc.collect()
    cache.reset()
    assert torch.equal(generate(ours, cache, 1), whole)
    assert len(cache._core.report()[0]["sequences"]) == 1


def test_a_fork_that_is_collected_during_a_pass(models):
    # Its removal abandoned the pass, and the next layer found no step in flight.
    _, ours = models
    cache, fresh = (KvistCache(ours.config, kv="f32") for _ in range(2))
    whole = generate(ours, cache, 1)
    forks = [cache.fork()]
    hook = ours.model.layers[1].register_forward_pre_hook(lambda *_: (forks.clear(), gc.collect()) and None)
    try:
        ended = go_on(ours, cache, whole, 4)
    finally:
        hook.remove()
    assert torch.equal(ended, go_on(ours, fresh, whole, 4))
    assert len(cache._core.report()[0]["sequences"]) == 1


def test_assisted_generation(models):
    theirs, ours = models
    expected = generate(theirs, DynamicCache(config=theirs.config), 1)
    assistant = AutoModelForCausalLM.from_config(theirs.config, attn_implementation="sdpa").eval()
    cache = KvistCache(ours.config, kv="f32")
    assert torch.equal(generate(ours, cache, 1, assistant_model=assistant), expected)


def contrastive(model, cache, tokens, n, k=4, alpha=0.6):
    """Contrastive search, as transformers' repository of it does it: every candidate is a row of the batch, and one is kept."""
    with torch.no_grad():
        out = model(tokens, past_key_values=cache, output_hidden_states=True)
        context, logits = out.hidden_states[-1][0], out.logits[0, -1]
        for _ in range(n):
            likely, candidates = logits.softmax(-1).topk(k)
            cache.batch_repeat_interleave(k)
            out = model(candidates.view(k, 1), past_key_values=cache, output_hidden_states=True)
            new = out.hidden_states[-1][:, 0]
            like = torch.nn.functional.cosine_similarity(new[:, None], context[None], dim=-1).max(dim=1).values
            best = int(((1 - alpha) * likely - alpha * like).argmax())
            cache.batch_select_indices(torch.tensor([best]))
            context, logits = torch.cat([context, new[best : best + 1]]), out.logits[best, -1]
            tokens = torch.cat([tokens, candidates[best].view(1, 1)], dim=1)
    return tokens


def test_contrastive_search(models):
    theirs, ours = models
    prompt = inputs(1)["input_ids"]
    expected = contrastive(theirs, DynamicCache(config=theirs.config), prompt, 12)
    cache = KvistCache(ours.config, kv="f32")
    assert torch.equal(contrastive(ours, cache, prompt, 12), expected)
    assert cache.batch_size == 1 and cache.get_seq_length() == expected.shape[1]
    assert torch.equal(contrastive(theirs, KvistCache(theirs.config, kv="f32"), prompt, 12), expected)
    # transformers' own `generate` takes it from a repository, and only if that is trusted.
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(ours, KvistCache(ours.config), 1, penalty_alpha=0.6, top_k=4)


def test_drafts_from_the_prompt_and_samples_of_one_prompt(models):
    theirs, ours = models
    expected = generate(theirs, DynamicCache(config=theirs.config), 1)
    cache = KvistCache(ours.config, kv="f32")
    assert torch.equal(generate(ours, cache, 1, prompt_lookup_num_tokens=3), expected)
    outputs = []
    for model, cache in [(theirs, DynamicCache(config=theirs.config)), (ours, KvistCache(ours.config, kv="f32"))]:
        torch.manual_seed(3)
        outputs.append(generate(model, cache, 1, do_sample=True, num_return_sequences=3, max_new_tokens=8))
    assert torch.equal(*outputs)


def test_packed_storages_take_less_memory(models):
    _, ours = models
    sizes = {}
    for kv in ("f32", "f16", "q8", "q4"):
        cache = KvistCache(ours.config, kv=kv, recent=0)
        asked = {"input_ids": torch.randint(2, 199, (1, 700))}
        ours.generate(**asked, past_key_values=cache, max_new_tokens=2, do_sample=False)
        sizes[kv] = cache.kv_bytes
    assert sizes["f16"] * 2 == sizes["f32"] and sizes["q8"] < sizes["f16"] * 0.7 and sizes["q4"] < sizes["q8"] * 0.7


def test_what_is_not_supported_is_refused(models):
    theirs, ours = models
    ids = inputs(1)["input_ids"]
    with torch.no_grad():
        with pytest.raises(ValueError, match="past_key_values"):
            ours(ids, use_cache=False)
        with pytest.raises(ValueError, match="past_key_values"):
            ours(ids)
        cache = KvistCache(ours.config)
        with pytest.raises(ValueError, match="output_attentions"):
            ours(ids, past_key_values=cache, output_attentions=True)
        with pytest.raises(ValueError, match="KvistCache"):
            ours(ids, past_key_values=DynamicCache(config=ours.config))
        assert cache.get_seq_length() == 0
        with pytest.raises(ValueError, match="masks"):
            ours(ids, past_key_values=cache, attention_mask=torch.ones(1, 1, 20, 20))
        ours(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="batch of 1"):
            ours(ids.repeat(2, 1), past_key_values=cache)
        with pytest.raises(ValueError, match="at most 64"):
            ours(ids.repeat(1, 4), past_key_values=KvistCache(ours.config, max_step_tokens=64))
    with pytest.raises(ValueError, match="gradients"):
        ours(ids, past_key_values=KvistCache(ours.config))
    ours.train()
    ours.config.attention_dropout, dropout = 0.5, ours.config.attention_dropout
    try:
        for layer in ours.model.layers:
            layer.self_attn.attention_dropout = 0.5
        with torch.no_grad(), pytest.raises(ValueError, match="dropout"):
            ours(ids, past_key_values=KvistCache(ours.config))
    finally:
        ours.config.attention_dropout = dropout
        for layer in ours.model.layers:
            layer.self_attn.attention_dropout = 0.0
        ours.eval()


def test_a_failed_pass_leaves_the_cache_as_it_was(models):
    _, ours = models
    cache = KvistCache(ours.config, kv="f32")
    whole = generate(ours, cache, 1)
    n = cache.get_seq_length()
    ours.model.layers[1].mlp.forward, kept = None, ours.model.layers[1].mlp.forward
    try:
        with torch.no_grad(), pytest.raises(TypeError):
            ours(whole[:, -1:], past_key_values=cache)
    finally:
        ours.model.layers[1].mlp.forward = kept
    assert cache.get_seq_length() == n
    fresh = KvistCache(ours.config, kv="f32")
    assert torch.equal(go_on(ours, cache, whole, 4), go_on(ours, fresh, whole, 4))
