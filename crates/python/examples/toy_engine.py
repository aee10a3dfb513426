"""A small engine with continuous batching, chunked prefill and prefix caching, as vLLM has: the model is a few lines of
NumPy, the bookkeeping is kvist's. K and V are plain arrays of cells, `[layers, cells, heads, head_dim]`.

    python examples/toy_engine.py
"""

import numpy as np
from kvist import NoSpace, cache

LAYERS, HEADS, DIM, VOCAB, BLOCK = 2, 4, 16, 97, 8
WIDTH = HEADS * DIM


class Model:
    """A decoder with random weights: attention only, learned positions."""

    def __init__(self, seed=0):
        random = np.random.default_rng(seed)
        self.embedding = random.normal(size=(VOCAB, WIDTH))
        self.position = random.normal(size=(1024, WIDTH))
        self.weights = random.normal(size=(LAYERS, 4, WIDTH, WIDTH)) / np.sqrt(WIDTH)

    def __call__(self, tokens, positions, attend):
        """`tokens` and `positions` are `[n]`; `attend(layer, q, k, v)` returns `[n, heads, dim]`. Logits `[n, VOCAB]`."""
        x = self.embedding[tokens] + self.position[positions]
        for layer, (wq, wk, wv, wo) in enumerate(self.weights):
            q, k, v = ((x @ w).reshape(-1, HEADS, DIM) for w in (wq, wk, wv))
            x = x + attend(layer, q, k, v).reshape(-1, WIDTH) @ wo
            x /= np.abs(x).mean(axis=1, keepdims=True)
        return x @ self.embedding.T


def softmax_attention(q, k, v, visible):
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)


class Request:
    def __init__(self, seq, prompt, max_tokens):
        self.seq, self.prompt, self.end = seq, list(prompt), len(prompt) + max_tokens
        self.tokens, self.done, self.hit = list(prompt), 0, 0  # `done` tokens are in the cache


class Engine:
    def __init__(self, model, capacity=512, batch_tokens=32):
        self.model, self.batch_tokens = model, batch_tokens
        self.blocks = cache.Paged(capacity, block_tokens=BLOCK)
        self.keys, self.values = np.zeros((2, LAYERS, capacity, HEADS, DIM))
        self.waiting, self.running, self.n = [], [], 0

    def submit(self, prompt, max_tokens):
        self.n += 1
        self.waiting.append(Request(self.n, prompt, max_tokens))
        return self.waiting[-1]

    def admit(self):
        """Opens requests as long as their tokens fit beside those that run."""
        promised = sum(request.end - request.done for request in self.running)
        while self.waiting:
            first = self.waiting[0]
            needed = promised + first.end + BLOCK * (len(self.running) + 1)
            self.blocks.evict(needed)
            if self.blocks.free_cells < needed:
                break
            first.done = first.hit = self.blocks.open(first.seq, first.prompt)
            promised += first.end - first.done
            self.running.append(self.waiting.pop(0))
        if self.waiting and not self.running:
            raise NoSpace(f"a request of {self.waiting[0].end} tokens does not fit into the cache")

    def batch(self):
        """A token of every request that decodes, and chunks of prompts with what is left of the step."""
        left, spans = self.batch_tokens, []
        for request in sorted(self.running, key=lambda it: len(it.tokens) - it.done):
            n = min(len(request.tokens) - request.done, left)
            if n > 0:
                spans.append((request, n))
                left -= n
        return spans

    def step(self):
        self.admit()
        spans = self.batch()
        with self.blocks.begin([(request.seq, n) for request, n in spans]) as step:
            tables, start, kv_len = step.block_tables(), step.query_start, step.kv_len
            for source, target, length in step.copies:
                for pool in (self.keys, self.values):
                    pool[:, target : target + length] = pool[:, source : source + length]

            def attend(layer, q, k, v):
                self.keys[layer, step.slots], self.values[layer, step.slots] = k, v
                out = np.empty_like(q)
                for i, table in enumerate(tables):
                    at = np.arange(kv_len[i])
                    cells = table[at // BLOCK] * BLOCK + at % BLOCK
                    mine = slice(start[i], start[i + 1])
                    visible = at <= step.positions[mine][:, None]
                    out[mine] = softmax_attention(
                        q[mine], self.keys[layer, cells], self.values[layer, cells], visible
                    )
                return out

            tokens = [token for r, n in spans for token in r.tokens[r.done : r.done + n]]
            logits = self.model(np.array(tokens), step.positions, attend)
            step.commit()
        for i, (request, n) in enumerate(spans):
            request.done += n
            self.blocks.store(request.seq, request.tokens[: request.done])
            if request.done == len(request.tokens):
                request.tokens.append(int(logits[start[i + 1] - 1].argmax()))
            if len(request.tokens) > request.end:
                request.tokens.pop()
                self.blocks.remove(request.seq)
                self.running.remove(request)

    def run(self):
        steps = 0
        while self.waiting or self.running:
            self.step()
            steps += 1
        return steps


def without_a_cache(model, prompt, max_tokens):
    """The same text, computed anew for each token."""
    tokens = list(prompt)

    def attend(_, q, k, v):
        return softmax_attention(q, k, v, np.tri(len(tokens), dtype=bool))

    for _ in range(max_tokens):
        tokens.append(int(model(np.array(tokens), np.arange(len(tokens)), attend)[-1].argmax()))
    return tokens


def main():
    random = np.random.default_rng(1)
    model = Model()
    system = random.integers(0, VOCAB, 40).tolist()
    prompts = [system + random.integers(0, VOCAB, n).tolist() for n in (5, 60, 1, 17, 33, 9)]
    engine = Engine(model)
    requests = [engine.submit(prompts[0], 12)]
    engine.run()  # its blocks are cached now
    requests += [engine.submit(prompt, 12) for prompt in prompts[1:]]
    steps = engine.run()
    for request, prompt in zip(requests, prompts):
        assert request.tokens == without_a_cache(model, prompt, 12), request.seq
    hits = [request.hit for request in requests]
    print(f"{len(requests) - 1} requests in {steps} steps; tokens from the prefix index: {hits}")
    assert hits[0] == 0 and all(hit >= 40 for hit in hits[1:])


if __name__ == "__main__":
    main()
