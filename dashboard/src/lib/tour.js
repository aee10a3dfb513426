// The guided tour: seven things that a cache does. Each step finds a suitable moment in the loaded recording; on a live cache
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
    for (const sequence of model.sequences.values()) named += sequence.tables[model.mainGroup].filter((block) => block !== null).length;
    const saved = named - model.groups[model.mainGroup].held;
    if (saved > best[0]) best = [saved, line.at];
  }
  return best[1];
}

export const STEPS = [
  {
    title: 'What is kept',
    spot: 'map',
    text: [
      'To generate the next token, a model looks back at every token before it. It needs two vectors per layer of each of them, called K and V, which never change once they are computed. So they are kept. That is the KV cache.',
      'The cache consists of blocks of a few tokens, and each square here is one block. A sequence takes any free block when its last one is full. Its block table lists its blocks in order.',
    ],
    at: (recording) => share(recording, 0.3),
  },
  {
    title: 'Prefill: reading the prompt',
    spot: 'timeline',
    text: [
      'A new prompt is read many tokens at a time. That is prefill, drawn in blue: much arithmetic in few steps. The first token of an answer has to wait for it.',
      'A long prompt is read in chunks, so that other requests can continue in between. Grey requests wait for a place in the batch.',
    ],
    at: (recording) => first(recording, (line) => line.chunk !== undefined && line.first > 0, share(recording, 0.05)),
    play: 0.1,
    zoom: 0.07,
  },
  {
    title: 'Decode: writing the answer',
    spot: 'tokens',
    text: [
      'Then each step generates one token per sequence: decode, drawn in green. A step reads all K and V of each sequence and the weights of the model, and computes little. So memory limits the speed, and because sequences share the reading of the weights, a step for many sequences costs hardly more than a step for one.',
      'That is why memory for more sequences is worth so much: a server with twice as many in a step may generate almost twice as fast.',
    ],
    at: (recording) => share(recording, 0.24),
    play: 1,
  },
  {
    title: 'Sharing: computing prefixes once',
    spot: 'sharing',
    text: [
      'Many prompts begin alike: with the same instructions, the same document, the same chat so far. Equal prefixes have equal K and V. So a later request uses the blocks that exist already, and computes only what follows.',
      'A bar over several rows is stored once. On the map its blocks have dots. A sequence that writes into a shared block gets a copy of it first, so the others are not affected.',
    ],
    at: mostShared,
  },
  {
    title: 'Kept for later',
    spot: 'map',
    text: [
      'When an answer is complete, its blocks are not cleared. They turn pale: no sequence uses them, but the prefix index keeps them for later prompts that begin alike.',
      'So a busy cache is always full. What counts is how much of it is in use, and how often the rest is hit again.',
    ],
    at: (recording) => first(recording, (line) => line.end !== undefined, share(recording, 0.3)),
    play: 0.5,
  },
  {
    title: 'Eviction: freeing blocks',
    spot: 'memory',
    text: [
      'When no block is free, pale blocks are evicted. A policy ranks them; the usual one evicts the least recently used first. Blocks in use are never evicted.',
      'The dashed line is the bound. Used and cached blocks together reach it and stay there.',
    ],
    at: (recording) => first(recording, (line) => line.make_room !== undefined),
    play: 0.5,
  },
  {
    title: 'What evictions cost',
    spot: 'reasons',
    text: [
      'If only a part of a prompt was found, there is a reason. If cached prompts continue differently, or the prompt is new, nothing can be done. If blocks had been evicted, more memory or another policy would have helped.',
      'If blocks in use fill the cache, a request is preempted, drawn in orange above, and has to be computed again later. Change a setting of the simulator and look at the same load again.',
    ],
    at: (recording) => share(recording, 0.98),
  },
];
