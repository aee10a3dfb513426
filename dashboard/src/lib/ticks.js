// Ticks of time axes: at round moments, as clocks count.
import { clock } from './format.js';

const SECOND = 1e9;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const powers = (from, to) => Array.from({ length: to - from }, (_, i) => [1, 2, 5].map((n) => n * 10 ** (from + i))).flat();

/** Distances of ticks, in nanoseconds. */
export const STEPS = [
  ...powers(0, 10),
  ...[10, 20, 30].map((n) => n * SECOND),
  ...[1, 2, 5, 10, 20, 30].map((n) => n * MINUTE),
  ...[1, 2, 3, 6, 12].map((n) => n * HOUR),
  ...powers(0, 4).map((n) => n * 24 * HOUR),
];

/** The smallest distance that is not below `least`. */
export const stepOf = (least) => STEPS.find((step) => step >= least) ?? STEPS.at(-1);

/** The label of a tick at `at`, where there is one every `step`. */
export function tick(at, step) {
  if (step >= HOUR) return `${Math.round(at / HOUR)} h`;
  if (step >= MINUTE) return `${Math.round(at / MINUTE)} min`;
  const behind = Math.max(0, -Math.floor(Math.log10(step / SECOND) + 1e-9));
  return clock(at, behind);
}
