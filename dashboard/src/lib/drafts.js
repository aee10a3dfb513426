// Draft trees: which nodes a step accepted, and where they are drawn.

/** The draft of each request that a step verified, by request id: `{ parents, path, emitted }`, of which `path` has the accepted nodes. */
export function verified({ drafts = [], advances }) {
  const found = new Map();
  // Drafts that did not fit into the cache were not verified: such a step has no `advances`.
  if (!advances) return found;
  for (const [index, id, parents] of drafts) {
    const { kept, path, emitted } = advances[index];
    // In both, the last known token comes first.
    const nodes = path ? path.slice(1).map((node) => node - 1) : Array.from({ length: (kept ?? parents.length + 1) - 1 }, (_, i) => i);
    found.set(id, { parents, path: nodes, emitted });
  }
  return found;
}

/** The request whose draft is shown: that of the sequence `pointed`, or the first live one, or the last one that had a draft. */
export function drafted(model, pointed) {
  let [live, last] = [null, null];
  for (const request of model.requests.values()) {
    if (!request.draft) continue;
    if (pointed !== null && request.seq === pointed && model.live.has(request.id)) return request;
    if (model.live.has(request.id)) live ??= request;
    if (!last || request.draft.at >= last.draft.at) last = request;
  }
  return live ?? last;
}

/** Places nodes by depth and row. The first child of a node stays in its row, and every other one gets a new row. */
export function layout(parents) {
  const children = parents.map(() => []);
  const roots = [];
  parents.forEach((parent, i) => (parent === null ? roots : children[parent]).push(i));
  const nodes = parents.map((parent) => ({ parent, depth: 0, row: 0 }));
  let [columns, rows] = [0, 0];
  const place = (list, depth) => {
    for (const i of list) {
      nodes[i].depth = depth;
      nodes[i].row = rows;
      columns = Math.max(columns, depth + 1);
      if (children[i].length > 0) place(children[i], depth + 1);
      else rows += 1;
    }
  };
  place(roots, 0);
  return { nodes, columns, rows };
}
