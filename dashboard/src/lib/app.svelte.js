// The state of the page: which recording or live server it shows, at which moment, and what is selected.
import { Flashes } from './flashes.js';
import { Live } from './live.js';
import { palette } from './palette.js';
import { Recording, textOf } from './recording.js';
import { Throttle } from './throttle.js';

const stored = (storage, key) => {
  try {
    return storage.getItem(key);
  } catch {
    return null; // the browser may forbid storage
  }
};
const store = (storage, key, value) => {
  try {
    if (value) storage.setItem(key, value);
    else storage.removeItem(key);
  } catch {
    /* the value then lasts as long as the page */
  }
};

const EXAMPLE = 'Example';

const darkly = matchMedia('(prefers-color-scheme: dark)');
const still = matchMedia('(prefers-reduced-motion: reduce)');

class App {
  /** What the page shows: 'recording' or 'live'. */
  source = $state('recording');
  /** State of the server: connecting, live, lost, denied, limited, refused, absent. */
  server = $state('connecting');
  /** Why the server refused, or the connection was lost; '' if that is unknown. */
  reason = $state('');
  name = $state('');
  error = $state('');
  /** A recording is being read. */
  loading = $state(false);
  /** Increases with every change, so that everything that reads it is drawn again. */
  tick = $state(0);
  /** Like `tick`, at most four times a second, and at once when a recording jumps: for expensive computations. */
  slow = $state(0);
  /** Changes when another recording or another server is shown. */
  epoch = $state(0);
  playing = $state(false);
  speed = $state(1);
  theme = $state(stored(localStorage, 'kvist-theme') ?? 'auto');
  systemDark = $state(darkly.matches);
  still = $state(still.matches);
  key = $state(stored(sessionStorage, 'kvist-key') ?? '');
  /** `{ g, block }` of the block whose history is shown. */
  followed = $state(null);
  /** The sequence, or the idle session, under the pointer in any view. */
  pointed = $state(null);
  /** The page of a live server: 'cache' or 'play'. */
  page = $state('cache');
  tour = $state(null);
  /** The part of the timeline that the tour shows. */
  zoom = $state(null);
  /** The card that the tour highlights. */
  spot = $state(null);

  recording = null;
  live = null;
  /** Called when another server answers, or the same one after a restart. */
  restarted = () => {};
  flashes = new Flashes();
  #slowly = new Throttle(250, () => (this.slow += 1));
  #jumped = false;
  #wanted = false;
  /** Number of recordings that were opened: a later one replaces those that are still being read. */
  #opened = 0;
  /** True while the user has chosen nothing else: the server is then shown as soon as it answers. */
  #awaited = true;
  /** What was shown before the tour. */
  #before = null;
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
  /** The cache and its requests over the whole known time. */
  get whole() {
    return this.source === 'live' ? this.live?.model ?? null : this.recording?.whole ?? null;
  }
  get at() {
    return this.source === 'live' ? this.live?.at ?? 0 : this.recording?.at ?? 0;
  }
  /** The time range of charts and timeline, in nanoseconds. */
  get span() {
    if (this.source === 'recording') return [this.recording?.begin ?? 0, this.recording?.end ?? 1];
    const at = this.at;
    const first = this.live?.model?.history?.turns[0]?.from ?? at - 1e9;
    return [Math.max(first, at - 300e9), Math.max(at, first + 1e9)];
  }
  /** Bytes of K and V per token, over all layers. Null if unknown, or if there are several layer groups. */
  get bytesPerToken() {
    const about = this.source === 'live' ? this.live?.about : null;
    return about?.groups.length === 1 ? about.bytes_per_token : null;
  }

  setTheme(theme) {
    this.theme = theme;
    store(localStorage, 'kvist-theme', theme === 'auto' ? null : theme);
  }
  setKey(key) {
    this.key = key;
    store(sessionStorage, 'kvist-key', key);
  }

  /** Schedules a redraw in the next frame. */
  changed = () => {
    if (this.#wanted) return;
    this.#wanted = true;
    requestAnimationFrame(() => {
      this.#wanted = false;
      this.tick += 1;
      if (this.#jumped) this.#slowly.force();
      else this.#slowly.ask();
      this.#jumped = false;
    });
  };
  /** The page shows another moment: redraw everything at once. */
  #jump() {
    this.#jumped = true;
    this.changed();
  }

  flash = (g, block, change) => {
    if (!this.still) this.flashes.add(g, block, change);
  };

  connect() {
    this.live?.stop();
    this.server = 'connecting';
    this.#awaited = true;
    this.live = new Live({
      key: () => this.key,
      // Ignore the server while the page shows a recording.
      onchange: (...change) => this.source === 'live' && this.flash(...change),
      changed: () => this.source === 'live' && this.changed(),
      begun: () => {
        this.restarted();
        if (this.source === 'live') this.#show('live');
      },
      state: (state, reason = '') => {
        this.server = state;
        this.reason = reason;
        if (state === 'live') {
          if (this.#awaited) this.show('live');
        } else if (this.live.model === null && (this.source === 'live' || this.recording === null)) {
          if (this.recording) this.show('recording');
          else this.example(() => this.server !== 'live');
        }
      },
    });
  }

  /** Opens the playground, and shows the live server if there is one. */
  talk() {
    this.page = 'play';
    if (this.source === 'recording' && this.live?.model) this.show('live');
  }

  show(source) {
    if (source === 'recording' && this.recording === null) return this.example();
    if (source === 'live') this.#awaited = false;
    this.playing = false;
    this.#show(source);
  }

  /** Starts to show `source`, with nothing selected. */
  #show(source) {
    this.source = source;
    this.name = source === 'live' ? this.live.about?.model ?? 'live' : this.recording.name;
    this.followed = null;
    this.pointed = null;
    this.flashes.clear();
    this.epoch += 1;
    this.#jump();
  }

  async open(blob, name) {
    const mine = ++this.#opened;
    this.error = '';
    this.loading = true;
    try {
      const text = await textOf(blob);
      if (mine !== this.#opened) return false;
      this.recording = new Recording(text, name);
      if (name !== EXAMPLE) this.#awaited = false;
      this.show('recording');
      return true;
    } catch (error) {
      if (mine === this.#opened) this.error = error instanceof Error ? error.message : String(error);
      return false;
    } finally {
      if (mine === this.#opened) this.loading = false;
    }
  }

  /** Loads the example recording, and shows it if `wanted()` still holds after loading, and no other one was opened. */
  async example(wanted = () => true) {
    if (this.exampleShown) return this.show('recording');
    const opened = this.#opened;
    this.loading = true;
    try {
      const response = await fetch('example.jsonl.gz');
      if (!response.ok) throw new Error(`the example recording is missing (status ${response.status})`);
      const blob = await response.blob();
      if (opened !== this.#opened) return;
      if (!wanted()) this.loading = false;
      else if (await this.open(blob, EXAMPLE)) {
        this.seek(this.recording.begin + (this.recording.end - this.recording.begin) * 0.42);
      }
    } catch (error) {
      if (opened !== this.#opened) return;
      this.loading = false;
      this.error = error.message;
    }
  }
  get exampleShown() {
    return this.source === 'recording' && this.recording?.name === EXAMPLE;
  }

  /** Starts the tour: on the live cache if several sequences are running there, otherwise on a recording. */
  async beginTour() {
    if (this.tour === null) this.#before = { source: this.source, page: this.page };
    this.#awaited = false;
    this.page = 'cache';
    const model = this.live?.model;
    const busy = model?.totals.prompt > 0 && model.live.size > 1;
    if (this.source === 'live' && !busy) await this.show('recording');
    this.tour = 0;
  }
  /** Ends the tour and shows what was shown before it. */
  endTour() {
    this.tour = null;
    this.speed = 1;
    this.zoom = null;
    this.spot = null;
    this.page = this.#before.page;
    if (this.#before.source === 'live' && this.source !== 'live' && this.live.model) this.show('live');
  }

  seek(at) {
    if (this.source !== 'recording' || !this.recording) return;
    this.recording.seek(at);
    this.#jump();
  }

  step(direction) {
    if (this.source !== 'recording' || !this.recording) return;
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
  /** The blocks in group `g` of the idle session under the pointer. Null if the pointer is not on one. */
  pointedBlocks(g) {
    if (typeof this.pointed !== 'string') return null;
    const session = this.model?.sessions?.find(({ id }) => id === this.pointed);
    return new Set(session?.tables[g] ?? []);
  }
  point(seq) {
    if (this.pointed === seq) return;
    this.pointed = seq;
    this.changed();
  }
}

export const app = new App();
