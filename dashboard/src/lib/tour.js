// The guided tour: six things that a cache does. Each step finds a suitable moment in the loaded recording; on a live cache
// it explains the current state.

const first = (recording, test, behind = 0) => {
  const line = recording.lines.find((line) => (line.at ?? 0) >= behind && test(line));
  return line ? line.at : null;
};
const share = (recording, s) => recording.begin + (recording.end - recording.begin) * s;

/** The moment with a prefix hit at which sharing saves the most blocks. */
function mostShared(recording) {
  let best = [0, null];
  const model = recording.keyframes[0].model.clone();
  for (const line of recording.lines) {
    model.apply(line);
    if (!line.blocks?.some((event) => event[1] === 'hit')) continue;
    let named = 0;
    for (const sequence of model.sequences.values()) named += sequence.tables[0].length;
    const saved = named - model.groups[0].held;
    if (saved > best[0]) best = [saved, line.at];
  }
  return best[1];
}

export const STEPS = [
  {
    title: 'What is kept',
    spot: 'map',
    text: [
      'To write the next token, a model looks back at every token before it. What it needs of them, two vectors per layer called K and V, never changes once computed. So it is kept. That is the KV cache.',
      'It is cut into blocks of a few tokens, and each square here is one block. A sequence takes the next free one when its last is full, wherever that lies; a table says which blocks are its own, in order.',
    ],
    at: (recording) => share(recording, 0.3),
  },
  {
    title: 'Prefill: reading',
    spot: 'timeline',
    text: [
      'A new prompt is read many tokens at once. That is prefill, drawn in blue: much arithmetic in few steps, and the reason why a first token takes its time.',
      'A long prompt is read in chunks, so that others can go on writing in between. In grey, somebody waits for a place.',
    ],
    at: (recording) => first(recording, (line) => line.chunk !== undefined && line.first > 0, share(recording, 0.05)),
    play: 0.1,
    zoom: 0.07,
  },
  {
    title: 'Decode: writing',
    spot: 'tokens',
    text: [
      'Then comes one token per step and sequence: decode, in green. Every step has to fetch the whole cache of each sequence to compute very little, so memory sets the pace, and serving many sequences in one step costs hardly more than serving one.',
      'That is why room for more sequences is worth so much: whoever can hold twice as many may write almost twice as fast.',
    ],
    at: (recording) => share(recording, 0.24),
    play: 1,
  },
  {
    title: 'Sharing: not reading twice',
    spot: 'sharing',
    text: [
      'Many prompts begin alike: the same instructions, the same document, the same chat so far. Equal beginnings have equal K and V. So whoever comes later points at the blocks that are there already, and starts computing behind them.',
      'A bar over several rows lies in memory once. In the map its squares bear dots. If one of several holders writes into such a block, it gets a copy first, and the others notice nothing.',
    ],
    at: mostShared,
  },
  {
    title: 'Kept for later',
    spot: 'map',
    text: [
      'When an answer is complete, its blocks are not wiped. They turn pale: held by nobody, but known to the index, in case that somebody asks something that begins like this.',
      'So a well used cache is always full. What counts is how much of it is held, and how often the rest is found again.',
    ],
    at: (recording) => first(recording, (line) => line.end !== undefined, share(recording, 0.3)),
    play: 0.5,
  },
  {
    title: 'Eviction: making room',
    spot: 'memory',
    text: [
      'When no block is free, pale ones have to go. A policy ranks them; the usual one forgets what was not used for longest. What somebody holds is never taken.',
      'The dashed line is the bound. Held and cached blocks together reach it and stay there.',
    ],
    at: (recording) => first(recording, (line) => line.make_room !== undefined),
    play: 0.5,
  },
  {
    title: 'What it costs to forget',
    spot: 'reasons',
    text: [
      'Every prompt that was found only in part has a reason. Others went on differently: nothing to be done. Nobody asked before: neither. It had been evicted: more memory, or another policy, would have helped.',
      'If even held blocks leave no room, somebody loses his place in the batch, in orange above, and has to be read again later. Turn a knob in the simulator and look at the same load once more.',
    ],
    at: (recording) => share(recording, 0.98),
  },
];
