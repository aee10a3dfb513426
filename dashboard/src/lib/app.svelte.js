// What the page shows: a recording or a live server, at one moment, and what is selected.
import { Live } from './live.js';
import { palette } from './palette.js';
import { Recording, textOf } from './recording.js';

const stored = (storage, key) => {
  try {
    return storage.getItem(key);
  } catch {
    return null; // storage may be forbidden
  }
};
const store = (storage, key, value) => {
  try {
    if (value) storage.setItem(key, value);
    else storage.removeItem(key);
  } catch {
    /* then it lasts as long as the page */
  }
};

const darkly = matchMedia('(prefers-color-scheme: dark)');
const still = matchMedia('(prefers-reduced-motion: reduce)');

class App {
  /** 'recording' or 'live': which of the two is shown. */
  source = $state('recording');
  /** Of the server: connecting, live, lost, denied, absent. */
  server = $state('connecting');
  name = $state('');
  error = $state('');
  loading = $state(true);
  /** Counts what was drawn: who reads it is drawn anew when anything changed. */
  tick = $state(0);
  /** The same, four times a second at most: for what is dear to compute. */
  slow = $state(0);
  /** Changes when another recording or another server is shown. */
  epoch = $state(0);
  playing = $state(false);
  speed = $state(1);
  theme = $state(stored(localStorage, 'kvist-theme') ?? 'auto');
  systemDark = $state(darkly.matches);
  still = $state(still.matches);
  key = $state(stored(sessionStorage, 'kvist-key') ?? '');
  /** `{ g, block }` of the block whose life is followed. */
  followed = $state(null);
  /** The sequence that is pointed at, anywhere. */
  pointed = $state(null);
  /** The request that is pointed at in the timeline or a list. */
  page = $state('cache');
  tour = $state(null);
  /** The part of the timeline that the tour shows. */
  zoom = $state(null);
  /** What the tour points at. */
  spot = $state(null);

  recording = null;
  live = null;
  #flashes = new Map();
  #slowAt = 0;
  #wanted = false;
  #last = 0;

  constructor() {
    darkly.addEventListener('change', () => (this.systemDark = darkly.matches));
    still.addEventListener('change', () => (this.still = still.matches));
  }

  dark = $derived(this.theme === 'auto' ? this.systemDark : this.theme === 'dark');
  palette = $derived(palette(this.dark));

  /** The cache and its requests at the moment that is shown. */
  get model() {
    return this.source === 'live' ? this.live?.model ?? null : this.recording?.now ?? null;
  }
  /** The same over the whole time that is known. */
  get whole() {
    return this.source === 'live' ? this.live?.model ?? null : this.recording?.whole ?? null;
  }
  get at() {
    return this.source === 'live' ? this.live?.at ?? 0 : this.recording?.at ?? 0;
  }
  /** What charts and lanes cover. */
  get span() {
    if (this.source === 'recording') return [this.recording?.begin ?? 0, this.recording?.end ?? 1];
    const at = this.at;
    const first = this.live?.model?.history?.turns[0]?.from ?? at - 1e9;
    return [Math.max(first, at - 300e9), Math.max(at, first + 1e9)];
  }
  get bytesPerToken() {
    return this.source === 'live' ? this.live?.about?.bytes_per_token ?? null : null;
  }

  setTheme(theme) {
    this.theme = theme;
    store(localStorage, 'kvist-theme', theme === 'auto' ? null : theme);
  }
  setKey(key) {
    this.key = key;
    store(sessionStorage, 'kvist-key', key);
  }

  /** Something changed: draw it in the next frame. */
  changed = () => {
    if (this.#wanted) return;
    this.#wanted = true;
    requestAnimationFrame((now) => {
      this.#wanted = false;
      this.tick += 1;
      if (now - this.#slowAt > 240 || !this.playing) {
        this.#slowAt = now;
        this.slow += 1;
      }
    });
  };

  flash = (g, block, change) => {
    if (this.still) return;
    const kind = { alloc: 1, copy_on_write: 1, hit: 2, share: 2, evict: 3, free: 0 }[change];
    if (kind) this.#flashes.set(g * 2 ** 32 + block, [kind, performance.now()]);
  };
  /** What happened to blocks of group `g` in the last moments: [block, kind, 1 → 0]. */
  *flashes(g) {
    const now = performance.now();
    for (const [id, [kind, since]] of this.#flashes) {
      const left = 1 - (now - since) / 600;
      if (left <= 0) this.#flashes.delete(id);
      else if (Math.floor(id / 2 ** 32) === g) yield [id % 2 ** 32, kind, left];
    }
  }
  get flashing() {
    return this.#flashes.size > 0;
  }

  connect() {
    this.live?.stop();
    this.server = 'connecting';
    this.live = new Live({
      key: () => this.key,
      onchange: this.flash,
      changed: () => this.source === 'live' && this.changed(),
      state: (state) => {
        const first = state === 'live' && this.server !== 'live' && this.server !== 'lost';
        this.server = state;
        if (first) this.show('live');
        else if ((state === 'absent' || state === 'denied') && this.recording === null) this.example();
      },
    });
  }

  show(source) {
    if (source === 'recording' && this.recording === null) return this.example();
    this.playing = false;
    this.source = source;
    this.name = source === 'live' ? this.live.about?.model ?? 'live' : this.recording.name;
    this.followed = null;
    this.pointed = null;
    this.loading = false;
    this.#flashes.clear();
    this.epoch += 1;
    this.changed();
  }

  async open(blob, name) {
    this.error = '';
    this.loading = true;
    try {
      this.recording = new Recording(await textOf(blob), name);
      this.show('recording');
      return true;
    } catch (error) {
      this.error = error instanceof Error ? error.message : String(error);
      return false;
    } finally {
      this.loading = false;
    }
  }

  async example() {
    if (this.exampleShown) return this.show('recording');
    try {
      const response = await fetch('example.jsonl.gz');
      if (!response.ok) throw new Error(`the example recording is missing (status ${response.status})`);
      if (await this.open(await response.blob(), 'Example')) {
        this.seek(this.recording.begin + (this.recording.end - this.recording.begin) * 0.42);
      }
    } catch (error) {
      this.loading = false;
      this.error = error.message;
    }
  }
  get exampleShown() {
    return this.source === 'recording' && this.recording?.name === 'Example';
  }

  /** The tour: over what is live, if anything has happened there; else over the example. */
  async begin() {
    this.page = 'cache';
    if (this.source === 'live' && this.live.model.totals.prompt === 0) await this.example();
    this.tour = 0;
  }

  seek(at) {
    if (this.source !== 'recording' || !this.recording) return;
    this.recording.seek(at);
    this.changed();
  }

  step(direction) {
    this.playing = false;
    this.seek(this.recording.neighbour(this.recording.at, direction));
  }

  play(on = !this.playing) {
    if (this.source !== 'recording' || !this.recording) return;
    if (on && this.recording.at >= this.recording.end) this.recording.seek(this.recording.begin);
    this.playing = on;
    this.#last = performance.now();
    if (on) requestAnimationFrame(this.#frame);
  }

  #frame = (now) => {
    if (!this.playing) return;
    const elapsed = Math.min(100, now - this.#last) * 1e6 * this.speed;
    this.#last = now;
    this.recording.seek(this.recording.at + Math.max(0, elapsed), this.flash);
    if (this.recording.at >= this.recording.end) this.playing = false;
    this.changed();
    requestAnimationFrame(this.#frame);
  };

  follow(g, block) {
    this.followed = block === null ? null : { g, block };
    this.changed();
  }
  point(seq) {
    if (this.pointed === seq) return;
    this.pointed = seq;
    this.changed();
  }
}

export const app = new App();
