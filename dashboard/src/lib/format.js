/** Formats nanoseconds in a suitable unit. */
export function time(ns, digits = 3) {
  const abs = Math.abs(ns);
  const [value, unit] = abs >= 60e9 && digits < 0 ? [ns / 60e9, 'min'] : abs >= 1e9 ? [ns / 1e9, 's'] : abs >= 1e6 ? [ns / 1e6, 'ms'] : abs >= 1e3 ? [ns / 1e3, 'µs'] : [ns, 'ns'];
  return `${trim(value, digits)} ${unit}`;
}

/** Formats a number with `digits` significant digits, at most three of them after the point. */
export function trim(value, digits = 3) {
  const abs = Math.abs(value);
  const behind = Math.max(0, Math.min(3, digits - 1 - Math.floor(Math.log10(abs || 1))));
  return value.toFixed(behind);
}

/** Formats nanoseconds as seconds for axes and clocks: 12.40 s. */
export const clock = (ns) => `${(ns / 1e9).toFixed(2)} s`;

export const count = (n) => n.toLocaleString('en-US');

export function bytes(n) {
  for (const unit of ['B', 'KiB', 'MiB', 'GiB', 'TiB']) {
    if (n < 1024 || unit === 'TiB') return `${trim(n)} ${unit}`;
    n /= 1024;
  }
}

export const percent = (share, behind = 0) => `${(share * 100).toFixed(behind)}%`;

/** diverged, never_seen → never seen */
export const words = (name) => name.replaceAll('_', ' ');
