/** Formats a number with `digits` significant digits, at most three of them after the point. */
export function trim(value, digits = 3) {
  const behind = (abs) => Math.max(0, Math.min(3, digits - 1 - Math.floor(Math.log10(abs || 1))));
  // 9.999 becomes 10.0, which has one digit more before the point.
  const rounded = Number(value.toFixed(behind(Math.abs(value))));
  return value.toFixed(behind(Math.abs(rounded)));
}

/** Formats `value` in the largest of the ascending `units`, `[name, size]`, of which it has at least one when it is rounded. */
function inUnit(value, units, digits) {
  for (const [i, [name, size]] of units.entries()) {
    // There are no parts of the smallest unit.
    const text = i === 0 ? String(Math.round(value / size)) : trim(value / size, digits);
    const next = units[i + 1]?.[1] ?? Infinity;
    const rounded = Number(text) * size;
    if (Math.abs(rounded) < next) return `${text} ${name}`;
    if (Math.abs(value) < next) value = rounded;
  }
}

const SECOND = 1e9;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const TIMES = [['ns', 1], ['µs', 1e3], ['ms', 1e6], ['s', SECOND], ['min', MINUTE], ['h', HOUR]];
const SIZES = ['B', 'KiB', 'MiB', 'GiB', 'TiB'].map((name, i) => [name, 1024 ** i]);

/** Formats nanoseconds in a suitable unit. */
export const time = (ns, digits = 3) => inUnit(ns, TIMES, digits);

export const bytes = (n) => inUnit(n, SIZES, 3);

/** Formats nanoseconds as a clock shows them: 12.40 s, 1:02.40, 1:00:02.40; with `behind` digits behind the point. */
export function clock(ns, behind = 2) {
  const unit = 10 ** behind;
  // Round first, so that 59.999 s is a minute.
  const total = Math.round((ns / SECOND) * unit);
  if (total < 60 * unit) return `${(total / unit).toFixed(behind)} s`;
  const two = (n) => String(n).padStart(2, '0');
  const seconds = ((total % (60 * unit)) / unit).toFixed(behind).padStart(behind > 0 ? behind + 3 : 2, '0');
  const minutes = Math.floor(total / (60 * unit));
  return minutes < 60 ? `${minutes}:${seconds}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${seconds}`;
}

export const count = (n) => n.toLocaleString('en-US');

export const percent = (share, behind = 0) => `${(share * 100).toFixed(behind)}%`;

/** diverged, never_seen → never seen */
export const words = (name) => name.replaceAll('_', ' ');
