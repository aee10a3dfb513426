// Who shares what: live sequences grouped by the blocks with which their tables begin.

/**
 * A forest over the block tables of `model` in group `g`. A node: `{ first, n, sequences, children, depth }`: `n` blocks
 * from the `first` of a table on, which exactly `sequences` have. Deterministic: ordered by first sequence.
 */
export function forest(model, g) {
  const root = { children: new Map(), sequences: [] };
  const tables = [...model.sequences.values()]
    .map((sequence) => ({ sequence, table: sequence.tables[g].filter((block) => block !== null) }))
    .filter(({ table }) => table.length > 0);
  for (const { sequence, table } of tables) {
    let node = root;
    for (const block of table) {
      let child = node.children.get(block);
      if (!child) node.children.set(block, (child = { children: new Map(), sequences: [] }));
      child.sequences.push(sequence.seq);
      node = child;
    }
  }
  const compress = (node, first) => {
    let n = 1;
    // A sequence may end inside a run that others go on with.
    while (node.children.size === 1) {
      const [only] = node.children.values();
      if (only.sequences.length !== node.sequences.length) break;
      node = only;
      n += 1;
    }
    const children = [...node.children.values()].map((child) => compress(child, first + n));
    return { first, n, sequences: node.sequences, children };
  };
  const trees = [...root.children.values()].map((child) => compress(child, 0));
  const held = new Set();
  let named = 0;
  for (const { table } of tables) {
    named += table.length;
    for (const block of table) held.add(block);
  }
  return { trees, named, held: held.size, longest: Math.max(0, ...tables.map(({ table }) => table.length)) };
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
