// Which blocks are shared: live sequences and idle sessions, grouped by the common prefixes of their block tables.

/** Ranks from the caller are smaller than this. */
const KNOWN = 1e6;

/** The rows to draw: live sequences by number, and idle sessions by id, with the blocks that they would find. */
function rows(model, g, rank) {
  const order = new Map((model.sessions ?? []).map(({ id }, i) => [id, rank(id) ?? KNOWN + i]));
  const busy = new Set();
  const live = [...model.sequences.values()].map((sequence) => {
    const request = sequence.request === null ? null : model.requests.get(sequence.request);
    busy.add(request?.session);
    return { key: sequence.seq, rests: false, table: sequence.tables[g], place: order.get(request?.session) ?? Infinity };
  });
  // A running session is drawn as its sequence.
  const resting = (model.sessions ?? [])
    .filter(({ id, running }) => !running && !busy.has(id))
    .map(({ id, tables }) => ({ key: id, rests: true, table: tables[g] ?? [], place: order.get(id) }));
  return [...live, ...resting]
    .map((row) => ({ ...row, table: row.table.filter((block) => block !== null) }))
    .filter(({ table }) => table.length > 0)
    .sort((a, b) => (a.place === b.place ? 0 : a.place - b.place)); // a stable sort: a session keeps its place when it runs
}

/**
 * A forest over the block tables of `model` in group `g`. A node `{ first, n, sequences, live, block, children }` is a
 * run of `n` blocks from index `first` of a table, which exactly `sequences` have in common; `live` of them are live, and
 * `block` is the first block. The order is deterministic: sessions that `rank` knows, then the others in the server's
 * order, then sequences without a session.
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
    // A sequence may end in the middle of a run that others continue.
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

/** Lays the forest out as rectangles: x in blocks, y in rows, one row per sequence. */
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
