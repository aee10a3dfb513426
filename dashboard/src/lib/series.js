// Data of the charts: values over time, in buckets. And the rate of the figures.
import { countUntil } from './history.js';

/** The share of a step that lies between `from` and `to`: its tokens are spread evenly over its duration. */
function shareOf(turn, from, to) {
  if (turn.to <= turn.from) return turn.to > from && turn.to <= to ? 1 : 0;
  return Math.max(0, Math.min(turn.to, to) - Math.max(turn.from, from)) / (turn.to - turn.from);
}

/** Decoded tokens per second around `at`, over one second. `turns` are in order. */
export function decodeRate(turns, at) {
  const ended = countUntil(turns, at, (turn) => turn.to);
  // In a recording, the step that runs at this moment is known.
  const running = turns[ended]?.from <= at ? turns[ended] : null;
  const last = turns[ended - 1];
  if (!running && !last) return 0;
  // A live server tells of a step when it has ended. As long as the next one may still run, the last one counts as now.
  const patience = last ? Math.max(200e6, 1.5 * (last.to - last.from)) : 0;
  const to = running || at - last.to > patience ? at : last.to;
  let tokens = running ? running.decode * shareOf(running, to - 1e9, to) : 0;
  for (let i = ended - 1; i >= 0 && turns[i].to > to - 1e9; i--) tokens += turns[i].decode * shareOf(turns[i], to - 1e9, to);
  return tokens;
}

/** `{ x, ttft, tpot, prefill, decode, hit, held, idle }`, x in seconds, null where there is no value. */
export function series(history, [from, to], buckets = 160) {
  const width = (to - from) / buckets;
  const empty = () => new Array(buckets).fill(null);
  const sums = () => new Float64Array(buckets);
  const of = (at) => Math.min(buckets - 1, Math.max(0, Math.floor((at - from) / width)));
  const inside = (at) => at >= from && at <= to;
  const x = Array.from({ length: buckets }, (_, i) => (from + (i + 0.5) * width) / 1e9);

  const mean = (points) => {
    const [total, n] = [sums(), sums()];
    for (const [at, value] of points) {
      if (!inside(at)) continue;
      total[of(at)] += value;
      n[of(at)] += 1;
    }
    return Array.from(total, (sum, i) => (n[i] > 0 ? sum / n[i] : null));
  };

  const [prefill, decode] = [sums(), sums()];
  const [held, idle] = [empty(), empty()];
  let last = -1;
  for (const turn of history.turns) {
    if (!inside(turn.to)) continue;
    const [a, b] = [of(turn.from), of(turn.to)];
    for (let i = a; i <= b; i++) {
      const share = a === b ? 1 : shareOf(turn, from + i * width, from + (i + 1) * width);
      prefill[i] += turn.prefill * share;
      decode[i] += turn.decode * share;
    }
    held[b] = turn.held;
    idle[b] = turn.idle;
    last = Math.max(last, b);
  }
  const steps = (values) => {
    let now = null;
    return values.map((value, i) => (i <= last ? (now = value ?? now) : null));
  };
  // The hit ratio over the last 20 requests, because a single one says little.
  const hit = empty();
  let [prompts, found] = [0, 0];
  history.admits.forEach(([at, prompt, hits], i) => {
    const [, oldPrompt, oldHits] = history.admits[i - 20] ?? [0, 0, 0];
    prompts += prompt - oldPrompt;
    found += hits - oldHits;
    if (inside(at)) hit[of(at)] = found / Math.max(1, prompts);
  });
  // Means over five buckets, to smooth single steps.
  const rate = (sum) =>
    Array.from(sum, (_, i) => {
      if (i > last) return null;
      const near = sum.subarray(Math.max(0, i - 2), Math.min(last, i + 2) + 1);
      return (near.reduce((a, b) => a + b, 0) / near.length / width) * 1e9;
    });
  return {
    x,
    ttft: mean(history.firsts),
    tpot: mean(history.ends),
    prefill: rate(prefill),
    decode: rate(decode),
    hit: steps(hit),
    held: steps(held),
    idle: steps(idle),
  };
}
