// A recording: parsed, reduced once from end to end, and then shown at any moment.
import { History } from './history.js';
import { Model, order } from './model.js';

/** Number of states that are kept to seek from. */
const KEYFRAMES = 40;

export class BadRecording extends Error {}

/** The text of a file that may be compressed. */
export async function textOf(blob) {
  const head = new Uint8Array(await blob.slice(0, 2).arrayBuffer());
  if (head[0] !== 0x1f || head[1] !== 0x8b) return blob.text();
  return new Response(blob.stream().pipeThrough(new DecompressionStream('gzip'))).text();
}

function parse(text) {
  const lines = [];
  let number = 0;
  for (let from = 0; from < text.length; ) {
    let to = text.indexOf('\n', from);
    if (to < 0) to = text.length;
    number += 1;
    if (to > from) {
      try {
        const line = JSON.parse(text.slice(from, to));
        if (line.arrive) delete line.arrive.prompt; // most of the file, and never shown
        lines.push(line);
      } catch {
        if (to < text.length) throw new BadRecording(`line ${number} is not JSON: is this a file of kvist simulate --record?`);
        // the recording was cut off in its last line
      }
    }
    from = to + 1;
  }
  return lines;
}

export class Recording {
  constructor(text, name) {
    this.name = name;
    const lines = parse(text);
    const header = lines.find((line) => line.format === 'kvist-recording');
    if (!header) {
      throw new BadRecording(`${name} does not begin with {"format":"kvist-recording",…}: record one with kvist simulate --record FILE`);
    }
    if (header.version !== 1) throw new BadRecording(`${name} is of version ${header.version}; this page reads version 1`);
    if (!header.groups) throw new BadRecording(`${name} does not tell the layer groups of its cache: record it anew`);
    this.lines = order(lines);
    const timed = this.lines.filter((line) => line.at !== undefined);
    if (timed.length === 0) throw new BadRecording(`${name} is empty: nothing arrived`);
    this.begin = timed[0].at;
    this.end = timed.at(-1).at;

    /** The model at the end of the run, for charts, timeline and the histories of blocks. */
    this.whole = new Model(header.groups);
    this.whole.history = new History();
    this.keyframes = [];
    const every = Math.max(200, Math.ceil(this.lines.length / KEYFRAMES));
    this.lines.forEach((line, i) => {
      if (i % every === 0) this.keyframes.push({ i, at: this.whole.at, model: this.whole.clone() });
      this.whole.apply(line);
    });
    this.seek(this.begin);
  }

  /** Moves to the moment `at`. Moving forward applies the lines in between and calls `onchange`; jumps do not call it. */
  seek(at, onchange = null) {
    at = Math.min(this.end, Math.max(this.begin, at));
    if (!this.now || at < this.at || this.#far(at)) {
      const frame = this.keyframes.findLast((frame) => frame.i === 0 || (this.lines[frame.i - 1].at ?? 0) <= at);
      if (!this.now || at < this.at || frame.i > this.next) {
        this.now = frame.model.clone();
        this.next = frame.i;
      }
      onchange = null;
    }
    this.now.onchange = onchange;
    while (this.next < this.lines.length && (this.lines[this.next].at ?? 0) <= at) {
      this.now.apply(this.lines[this.next]);
      this.next += 1;
    }
    this.at = at;
  }

  #far(at) {
    const ahead = this.keyframes.find((frame) => frame.i > this.next + 200);
    return ahead !== undefined && ahead.at < at;
  }

  /** The next moment after `at` (or the last one before it) with an event. */
  neighbour(at, direction) {
    if (direction > 0) return this.lines.find((line) => line.at > at)?.at ?? this.end;
    return this.lines.findLast((line) => line.at !== undefined && line.at < at)?.at ?? this.begin;
  }
}
