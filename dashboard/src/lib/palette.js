// Colours of the canvases. CSS has its own in app.css. Both use OKLCH, where equal lightness looks equally light.

/** Converts OKLCH to [r, g, b], 0 to 255, with Björn Ottosson's matrices. */
export function oklch(l, c, h) {
  const a = c * Math.cos((h * Math.PI) / 180);
  const b = c * Math.sin((h * Math.PI) / 180);
  const long = (l + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const middle = (l - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (l - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const gamma = (x) => {
    const v = x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, v)));
  };
  return [
    gamma(4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short),
    gamma(-1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short),
    gamma(-0.0041960863 * long - 0.7034186147 * middle + 1.707614701 * short),
  ];
}

const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
const mix = (a, b, t) => a.map((x, i) => Math.round(x + (b[i] - x) * t));
/** A pixel of ImageData as one number, on little-endian machines: all that run browsers. */
export const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

const golden = 137.508;
/** Maximum number of cached colours: more than the live sequences, fewer than a server's sequences in a day. */
const KEPT_COLOURS = 1 << 16;

/** Contrast ratio of two colours by WCAG, 1 to 21. */
export function contrast(a, b) {
  const linear = (x) => ((x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}

export function palette(dark) {
  const surface = dark ? oklch(0.215, 0.008, 160) : oklch(0.995, 0.002, 100);
  const free = dark ? oklch(0.26, 0.008, 160) : oklch(0.945, 0.004, 100);
  /** Outline of empty cells, with the contrast that WCAG requires of graphics, 3:1. */
  const line = dark ? oklch(0.54, 0.012, 160) : oklch(0.64, 0.01, 130);
  const ink = dark ? oklch(0.93, 0.008, 120) : oklch(0.27, 0.015, 160);
  /** Text beside what matters more, as `--quiet` in app.css. */
  const quiet = dark ? oklch(0.7, 0.012, 150) : oklch(0.49, 0.012, 150);
  const sequences = new Map();
  const sequence = (seq) => {
    // The owner of a block that is older than the page is unknown.
    if (seq < 0) return line;
    let colour = sequences.get(seq);
    if (!colour) {
      const lightness = (dark ? 0.7 : 0.66) + (((seq * 7) % 5) - 2) * 0.022;
      colour = oklch(lightness, dark ? 0.115 : 0.125, (155 + seq * golden) % 360);
      if (sequences.size >= KEPT_COLOURS) sequences.clear();
      sequences.set(seq, colour);
    }
    return colour;
  };
  // From pale to strong; both ends contrast with the surface.
  const scale = (from, to, steps = 64) =>
    Array.from({ length: steps }, (_, i) => {
      const t = i / (steps - 1);
      return oklch(from[0] + (to[0] - from[0]) * t, from[1] + (to[1] - from[1]) * t, from[2] + (to[2] - from[2]) * t);
    });
  return {
    dark,
    surface,
    free,
    line,
    ink,
    quiet,
    sequence,
    /** Colour of a cached block that no sequence uses. */
    idle: (colour) => mix(colour, free, dark ? 0.62 : 0.66),
    heat: dark ? scale([0.33, 0.03, 250], [0.85, 0.16, 75]) : scale([0.88, 0.03, 250], [0.58, 0.19, 40]),
    age: dark ? scale([0.82, 0.13, 155], [0.36, 0.03, 240]) : scale([0.6, 0.13, 155], [0.88, 0.02, 240]),
    refs: dark ? scale([0.4, 0.03, 200], [0.86, 0.15, 140]) : scale([0.86, 0.035, 200], [0.46, 0.13, 150]),
    accent: dark ? oklch(0.78, 0.13, 155) : oklch(0.52, 0.12, 155),
    alarm: dark ? oklch(0.72, 0.16, 30) : oklch(0.58, 0.18, 30),
    phases: {
      queued: dark ? oklch(0.58, 0.012, 160) : oklch(0.63, 0.012, 120),
      prefill: dark ? oklch(0.74, 0.12, 245) : oklch(0.6, 0.13, 250),
      decode: dark ? oklch(0.76, 0.13, 155) : oklch(0.6, 0.13, 155),
      loading: dark ? oklch(0.74, 0.13, 340) : oklch(0.6, 0.16, 340),
      preempted: dark ? oklch(0.72, 0.15, 40) : oklch(0.66, 0.16, 45),
    },
    /** Where the content of a block came from, the fastest tier first, and what was computed. */
    tiers: [305, 65, 225, 10].map((hue) => (dark ? oklch(0.74, 0.12, hue) : oklch(0.6, 0.14, hue))),
    computed: dark ? oklch(0.56, 0.02, 160) : oklch(0.7, 0.015, 150),
    css,
    mix,
  };
}
