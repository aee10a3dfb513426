// Who shares what: live sequences, and sessions at rest, grouped by the blocks with which their tables begin.

/** Ranks that a caller gives are below. */
const KNOWN = 1e6;

/** What is drawn as a row: a live sequence by its number, a session at rest by its id, with the blocks it would find. */
function rows(model, g, rank) {
  const order = new Map((model.sessions ?? []).map(({ id }, i) => [id, rank(id) ?? KNOWN + i]));
  const busy = new Set();
  const live = [...model.sequences.values()].map((sequence) => {
    const request = sequence.request === null ? null : model.requests.get(sequence.request);
    busy.add(request?.session);
    return { key: sequence.seq, rests: false, table: sequence.tables[g], place: order.get(request?.session) ?? Infinity };
  });
  // One that runs is drawn as the sequence that it runs in.
  const resting = (model.sessions ?? [])
    .filter(({ id, running }) => !running && !busy.has(id))
    .map(({ id, tables }) => ({ key: id, rests: true, table: tables[g] ?? [], place: order.get(id) }));
  return [...live, ...resting]
    .map((row) => ({ ...row, table: row.table.filter((block) => block !== null) }))
    .filter(({ table }) => table.length > 0)
    .sort((a, b) => (a.place === b.place ? 0 : a.place - b.place)); // stable: a session keeps its place when it runs
}

/**
 * A forest over the block tables of `model` in group `g`. A node: `{ first, n, sequences, live, block, children }`: `n`
 * blocks from the `first` of a table on, which exactly `sequences` have, `live` of them live; `block` is the first one.
 * Deterministic: sessions stand in the order that `rank` gives to their ids, others in the server's; then sequences of
 * none.
 */
export function forest(model, g, rank = () => null) {
  const root = { children: new Map(), sequences: [] };
  const tables = rows(model, g, rank);
  for (const { key, rests, table } of tables) {
    let node = root;
    for (const block of table) {
      let child = node.children.get(block);
      if (!child) node.children.set(block, (child = { children: new Map(), sequences: [], live: 0, block }));
      child.sequences.push(key);
      child.live += rests ? 0 : 1;
      node = child;
    }
  }
  const compress = (node, first) => {
    const { block } = node;
    let n = 1;
    // A sequence may end inside a run that others go on with.
    while (node.children.size === 1) {
      const [only] = node.children.values();
      if (only.sequences.length !== node.sequences.length || only.live !== node.live) break;
      node = only;
      n += 1;
    }
    const children = [...node.children.values()].map((child) => compress(child, first + n));
    return { first, n, sequences: node.sequences, live: node.live, block, children };
  };
  const trees = [...root.children.values()].map((child) => compress(child, 0));
  const held = new Set();
  let named = 0;
  for (const { table } of tables) {
    named += table.length;
    for (const block of table) held.add(block);
  }
  const resting = tables.filter(({ rests }) => rests).length;
  return { trees, named, held: held.size, resting, live: tables.length - resting, longest: Math.max(0, ...tables.map(({ table }) => table.length)) };
}

/** Rectangles: x in blocks, y in rows, a row per sequence. */
export function layout({ trees }) {
  const nodes = [];
  const rows = [];
  const place = (node, parent) => {
    const y = rows.length;
    const at = nodes.push({ ...node, children: undefined, y, parent }) - 1;
    const inside = new Set();
    for (const child of node.children) {
      place(child, at);
      child.sequences.forEach((seq) => inside.add(seq));
    }
    for (const seq of node.sequences) {
      if (!inside.has(seq)) rows.push({ seq, end: node.first + node.n });
    }
    nodes[at].height = rows.length - y;
  };
  trees.forEach((tree) => place(tree, -1));
  return { nodes, rows };
}
