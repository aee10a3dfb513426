"""Quantisers for the two k-quants in use, which the `gguf` package can only read.

Blocks of 256 weights as ggml lays them out; scales are found as in llama.cpp's reference quantisers, by a small
search that minimises the weighted squared error. Every function takes f32 rows `[n, 256]` and gives bytes.
"""
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants

BLOCK = 256


def _divide(a, b):
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape, np.float32), where=b != 0)


def _f16(x):
    """Rounded to f16: the bytes, and the value that a reader gets back."""
    half = x.astype(np.float16)
    return half.view(np.uint8).reshape(len(x), 2), half.astype(np.float32)


def _symmetric(x, levels):
    """The scale of each group [..., n] for integers -levels..levels-1, the weight of an error being x²."""
    peak = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
    weight = x * x
    best, scale = np.full(peak.shape, -1.0, np.float32), np.zeros_like(peak)
    for step in range(-9, 10):
        q = np.clip(np.rint(x * _divide(np.float32(-(levels + 0.1 * step)), peak)), -levels, levels - 1)
        xq, qq = (weight * x * q).sum(-1, keepdims=True), (weight * q * q).sum(-1, keepdims=True)
        score = _divide(xq * xq, qq)
        better = score > best
        best, scale = np.where(better, score, best), np.where(better, _divide(xq, qq), scale)
    return scale[..., 0]


def _with_minimum(x, top):
    """Scale and minimum (as a positive offset below zero) of each group for integers 0..top."""
    weight = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    low, high = np.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
    scale, offset = _divide(high - low, np.float32(top)), low
    best = np.full(low.shape, np.inf, np.float32)
    sum_w, sum_x = weight.sum(-1, keepdims=True), (weight * x).sum(-1, keepdims=True)
    for step in range(-1, 21):
        inverse = _divide(np.float32(top if step < 0 else top - 1 + 0.1 * step), high - low)
        q = np.clip(np.rint((x - low) * inverse), 0, top)
        sum_q, sum_qq = (weight * q).sum(-1, keepdims=True), (weight * q * q).sum(-1, keepdims=True)
        sum_xq = (weight * x * q).sum(-1, keepdims=True)
        det = sum_w * sum_qq - sum_q * sum_q
        s = np.where(det > 0, _divide(sum_w * sum_xq - sum_x * sum_q, det), scale)
        m = np.where(det > 0, _divide(sum_qq * sum_x - sum_q * sum_xq, det), low)
        s, m = np.where(m > 0, _divide(sum_xq, sum_qq), s), np.minimum(m, 0)
        error = (weight * (s * q + m - x) ** 2).sum(-1, keepdims=True)
        better = error < best
        best, scale, offset = np.where(better, error, best), np.where(better, s, scale), np.where(better, m, offset)
    return np.maximum(scale[..., 0], 0), -offset[..., 0]


def q6_k(rows):
    """Sixteen groups of 16, 6 bits a weight, 8-bit scales: 210 bytes a block."""
    groups = rows.reshape(-1, 16, 16)
    scale = _symmetric(groups, 32)
    peak = np.take_along_axis(scale, np.abs(scale).argmax(-1, keepdims=True), -1)
    d_bytes, d = _f16(peak / -128.0)
    scales = np.clip(np.rint(_divide(np.float32(-128.0), peak) * scale), -128, 127).astype(np.int8)
    step = (d * scales)[..., None]
    q = (np.clip(np.rint(_divide(groups, step)), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | ((q[:, :, 2:] & 15) << 4)                    # [n, half, 2, 32]
    high = (q >> 4)
    high = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    n = len(rows)
    return np.concatenate([low.reshape(n, 128), high.reshape(n, 64), scales.view(np.uint8), d_bytes], axis=1)


def q4_k(rows):
    """Eight groups of 32, 4 bits a weight, 6-bit scales and minima: 144 bytes a block."""
    groups = rows.reshape(-1, 8, 32)
    scale, offset = _with_minimum(groups, 15)
    top_scale, top_offset = scale.max(-1, keepdims=True), offset.max(-1, keepdims=True)
    d_bytes, d = _f16(top_scale / 63.0)
    m_bytes, dmin = _f16(top_offset / 63.0)
    s = np.clip(np.rint(_divide(np.float32(63.0), top_scale) * scale), 0, 63).astype(np.uint8)
    m = np.clip(np.rint(_divide(np.float32(63.0), top_offset) * offset), 0, 63).astype(np.uint8)
    q = np.rint(_divide(groups + (dmin * m)[..., None], (d * s)[..., None]))
    q = np.clip(q, 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = np.concatenate([
        (s[:, :4] & 63) | ((s[:, 4:] >> 4) << 6),
        (m[:, :4] & 63) | ((m[:, 4:] >> 4) << 6),
        (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4),
    ], axis=1)
    n = len(rows)
    return np.concatenate([d_bytes, m_bytes, packed, (q[:, :, 0] | (q[:, :, 1] << 4)).reshape(n, 128)], axis=1)


def quantize(data, kind):
    """As `gguf.quants.quantize`, with Q4_K and Q6_K."""
    ours = {T.Q4_K: q4_k, T.Q6_K: q6_k}.get(kind)
    if ours is None:
        return quants.quantize(data, kind)
    if data.shape[-1] % BLOCK:
        raise ValueError(f"rows of {data.shape[-1]} do not divide into blocks of {BLOCK}")
    blocks = ours(np.ascontiguousarray(data, np.float32).reshape(-1, BLOCK))
    return blocks.reshape(*data.shape[:-1], -1)
