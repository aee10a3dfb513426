/** The real clock. Tests pass their own to what takes a `clock`. */
export const CLOCK = { now: () => performance.now(), setTimeout: (run, ms) => setTimeout(run, ms), clearTimeout: (id) => clearTimeout(id) };
