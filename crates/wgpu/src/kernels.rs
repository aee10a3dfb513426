//! The WGSL of the kernels. Every file begins with what it computes.
use kvist_device::weights::Encoding;
use kvist_gpu::{ATTEND_ROWS, Constant, Form, GemmTile, Kernel, Limits, MANY_TOKENS, MATMUL_OUTPUTS, Routed};
use std::borrow::Cow;

/// Buffers that [`Kernel::Several`] binds.
const SEVERAL_BINDINGS: u32 = 11;
/// Rows that an invocation of `matmul_units` and `several` computes side by side: a workgroup has two groups of lanes.
const ROWS_OF_LANE: u32 = MATMUL_OUTPUTS / 2;
/// Cells that `attend_fast` goes through at once.
const ATTEND_CELLS: u32 = 128;
/// Outputs, and tokens, of a workgroup of `gemm_halves`.
const GEMM_OUTPUTS: u32 = 128;
const GEMM_TOKENS: [u32; 3] = [128, 64, 32];
/// Workgroups of it that fill a large GPU.
const ENOUGH_GROUPS: u32 = 128;

const MATH: &str = include_str!("kernels/math.wgsl");
const ELEMENT_EXACT: &str = include_str!("kernels/element_exact.wgsl");
const ELEMENT_FAST: &str = include_str!("kernels/element_fast.wgsl");
const BYTES: &str = include_str!("kernels/bytes.wgsl");
const ENCODINGS: &str = include_str!("kernels/encodings.wgsl");
const WEIGHTS: &str = include_str!("kernels/weights.wgsl");
const ROUTES: &str = include_str!("kernels/routes.wgsl");
const PRODUCT: &str = concat!(include_str!("kernels/routes.wgsl"), include_str!("kernels/product.wgsl"));
const INPUTS: &str = include_str!("kernels/inputs.wgsl");
const UNITS: &str = include_str!("kernels/units.wgsl");
const UNIT_SUMS: &str = include_str!("kernels/unit_sums.wgsl");
const UNIT_ROWS: &str = include_str!("kernels/unit_rows.wgsl");
const LANES: &str = include_str!("kernels/lanes.wgsl");
const LANES_OF_SUBGROUPS: &str = include_str!("kernels/lanes_of_subgroups.wgsl");
const GATE: &str = include_str!("kernels/gate.wgsl");
const SINKS: &str = include_str!("kernels/sinks.wgsl");
const LEVELS: &str = include_str!("kernels/levels.wgsl");
const TURN: &str = include_str!("kernels/turn.wgsl");
const CELLS: &str = include_str!("kernels/cells.wgsl");
const ROTATION: &str = include_str!("kernels/rotation.wgsl");
const STORE_ROWS: &str = include_str!("kernels/store_rows.wgsl");
const STORE_SIDE: &str = include_str!("kernels/store_side.wgsl");
const ATTEND_PLAN: &str = include_str!("kernels/attend_plan.wgsl");
const FETCH: &str = include_str!("kernels/fetch.wgsl");

fn constant(name: &str, value: Constant) -> String {
    match value {
        Constant::Flag(is) => format!("const {name}: bool = {is};\n"),
        Constant::Number(n) => format!("const {name}: u32 = {n}u;\n"),
    }
}

/// A file for one side, K or V: its name instead of `side_`.
fn of_side(file: &str, name: &str) -> Cow<'static, str> {
    file.replace("side_", name).replace("SIDE_", &name.to_uppercase()).into()
}

/// A file for one of several matrices: its name instead of `matrix_`.
fn of_matrix(file: &str, name: &str) -> Cow<'static, str> {
    file.replace("matrix_", name).into()
}

/// Appends a file in which every `unroll(name, N) { … }` is N blocks, in which `name` is a constant; N is a number or one of the
/// constants. Compilers of drivers leave many loops of constant length as they are, and then keep arrays that the loop indexes in memory
/// instead of registers: on an H200 attention of one token was several times as slow.
fn unrolled(file: &str, constants: &[(String, Constant)], out: &mut String) {
    const WORD: &str = "unroll(";
    let Some((before, rest)) = file.split_once(WORD) else {
        out.push_str(file);
        out.push('\n');
        return;
    };
    let (head, rest) = rest.split_once(") {").expect("unroll(name, N) { … }");
    let (name, count) = head.split_once(", ").expect("a name and a number");
    let known = constants.iter().find(|(name, _)| name == count).map(|(_, value)| *value);
    let count = match known {
        Some(Constant::Number(n)) => n,
        _ => count.parse().expect("a number or a constant"),
    };
    let mut depth = 1;
    let end = rest.find(|letter| {
        depth += match letter {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        depth == 0
    });
    let end = end.expect("the block ends");
    out.push_str(before);
    let mut body = String::new();
    unrolled(&rest[..end], constants, &mut body);
    for i in 0..count {
        *out += &format!("{{ const {name}: u32 = {i}u;{body}}}\n");
    }
    unrolled(&rest[end + 1..], constants, out);
}

/// Which kernels there are for a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Lanes exchange values within subgroups.
    pub subgroups: bool,
    /// Results may depend on the batch: kernels that add up in other orders, and are faster.
    pub fast: bool,
    /// Storage buffers that a kernel can bind.
    pub bindings: u32,
    /// Subgroups of 32 lanes multiply matrices of 16 x 16, f16 to f32.
    pub cooperative: bool,
    pub max_workgroup_bytes: u32,
}

impl Target {
    /// Whether [`Kernel::Several`] computes layers.
    pub fn has_several(&self) -> bool {
        self.bindings >= SEVERAL_BINDINGS && self.fast
    }

    /// What a workgroup of [`Kernel::Gemm`] computes. f32 stays exact.
    pub fn gemm_tile(&self, encoding: u32, routed: Routed, tokens: u32, outputs: u32) -> GemmTile {
        // Without cooperative matrices fewer tokens are not worth a tile, unless they are alone with their expert's weights.
        let few = !self.cooperative && tokens < MANY_TOKENS && routed != Routed::Experts;
        let is_exact = Encoding::RESIDENT.get(encoding as usize) == Some(&Encoding::F32);
        if !self.fast || is_exact || few {
            return GemmTile::USUAL;
        }
        // A workgroup has rows of one expert: a tile for more rows than an expert has would compute some in vain.
        let most = if routed == Routed::Experts { tokens.next_power_of_two() } else { u32::MAX };
        let fits = |tile: &GemmTile| self.gemm_bytes(*tile) <= self.max_workgroup_bytes;
        let tile = |tokens| GemmTile { outputs: GEMM_OUTPUTS, tokens, halves: true };
        let groups =
            |tile: &GemmTile| outputs.div_ceil(tile.outputs).saturating_mul(tokens.div_ceil(tile.tokens));
        let mut tiles = GEMM_TOKENS.map(tile).into_iter().filter(fits);
        let smallest = tiles.clone().next_back();
        // The largest one of which there are enough to fill a GPU.
        tiles
            .find(|tile| tile.tokens <= most && groups(tile) >= ENOUGH_GROUPS)
            .or(smallest)
            .unwrap_or(GemmTile::USUAL)
    }

    /// Bytes of workgroup memory of `gemm_halves`: rows of 64 weights or inputs, and sums of eight subgroups.
    fn gemm_bytes(&self, tile: GemmTile) -> u32 {
        (tile.outputs + tile.tokens) * (64 + 8) * 2 + if self.cooperative { 8 * 256 * 4 } else { 0 }
    }

    /// Whether some layers take their inputs in f16.
    pub fn has_halves(&self) -> bool {
        let all = 0..Encoding::RESIDENT.len() as u32;
        all.into_iter().any(|encoding| self.gemm_tile(encoding, Routed::No, u32::MAX / 2, 1).halves)
    }

    /// Whether `attend_fast` computes attention with such keys: its workgroup memory has room for eight rows.
    fn attends_fast(&self, k: Form, dim: u32, recent: bool) -> bool {
        let rows = ATTEND_ROWS[0];
        let plain = if k.needs_plain_queries(recent) { rows } else { 1 };
        // Queries, twice; scores, and largest ones; three words of each cell, six of each row.
        let words = (2 * rows + plain) * dim + (rows + rows / 4 + 3) * ATTEND_CELLS + 6 * rows;
        self.fast && 4 * words <= self.max_workgroup_bytes
    }

    /// Query rows of a workgroup of attention for tiles of `wanted` rows.
    pub fn attend_rows(
        &self,
        limits: &Limits,
        wanted: u32,
        (k, _): (Form, Form),
        dim: u32,
        recent: bool,
    ) -> u32 {
        match self.attends_fast(k, dim, recent) {
            // More rows would share the cells that they read, but take more registers: on an H200 prompts were slower with 16 and with 32.
            true => ATTEND_ROWS[0],
            false => kvist_gpu::attend_rows(limits, wanted, k, dim, recent),
        }
    }

    /// The files of a kernel, in order.
    fn parts(&self, kernel: &Kernel) -> Vec<Cow<'static, str>> {
        let lanes = if self.subgroups { LANES_OF_SUBGROUPS } else { LANES };
        let element = if self.fast { ELEMENT_FAST } else { ELEMENT_EXACT };
        let text = |parts: &[&'static str]| parts.iter().map(|part| (*part).into()).collect();
        match *kernel {
            Kernel::Embed { .. } => {
                text(&[MATH, BYTES, ENCODINGS, WEIGHTS, include_str!("kernels/embed.wgsl")])
            }
            Kernel::Matmul { .. } if self.fast => {
                let mut parts: Vec<_> = text(&[MATH, BYTES, ENCODINGS, PRODUCT, lanes, UNITS, UNIT_SUMS]);
                parts.extend([FETCH, UNIT_ROWS].map(|file| of_matrix(file, "w_")));
                parts.push(include_str!("kernels/matmul_units.wgsl").into());
                parts
            }
            Kernel::Matmul { .. } => text(&[
                MATH,
                BYTES,
                ENCODINGS,
                WEIGHTS,
                PRODUCT,
                INPUTS,
                lanes,
                include_str!("kernels/matmul.wgsl"),
            ]),
            Kernel::Several { .. } => {
                let mut parts: Vec<_> = text(&[MATH, GATE, BYTES, ENCODINGS, lanes, UNITS, UNIT_SUMS]);
                for name in ["w0_", "w1_", "w2_"] {
                    parts.extend([FETCH, UNIT_ROWS].map(|file| of_matrix(file, name)));
                }
                parts.push(include_str!("kernels/several.wgsl").into());
                parts
            }
            Kernel::Gemm { tile, .. } if tile.halves => {
                let mut parts: Vec<_> = text(&[MATH, BYTES, ENCODINGS, PRODUCT, UNITS]);
                parts.push(of_matrix(FETCH, "w_"));
                let [products, gemm] = match self.cooperative {
                    true => {
                        [include_str!("kernels/products_coop.wgsl"), include_str!("kernels/gemm_coop.wgsl")]
                    }
                    false => {
                        [include_str!("kernels/products_plain.wgsl"), include_str!("kernels/gemm_plain.wgsl")]
                    }
                };
                parts.extend([products, include_str!("kernels/gemm_halves.wgsl"), gemm].map(Cow::from));
                parts
            }
            Kernel::Gemm { .. } => {
                text(&[MATH, BYTES, ENCODINGS, WEIGHTS, PRODUCT, INPUTS, include_str!("kernels/gemm.wgsl")])
            }
            Kernel::Halves => text(&[include_str!("kernels/halves.wgsl")]),
            Kernel::Norm { .. } => text(&[lanes, include_str!("kernels/norm.wgsl")]),
            Kernel::Rope => text(&[ROTATION, include_str!("kernels/rope.wgsl")]),
            Kernel::Gated => text(&[MATH, GATE, include_str!("kernels/gated.wgsl")]),
            Kernel::Add => text(&[include_str!("kernels/add.wgsl")]),
            Kernel::Rows(_) => text(&[include_str!("kernels/rows.wgsl")]),
            Kernel::Route => text(&[MATH, ROUTES, include_str!("kernels/route.wgsl")]),
            Kernel::Sort => text(&[ROUTES, include_str!("kernels/sort.wgsl")]),
            Kernel::Combine => text(&[ROUTES, include_str!("kernels/combine.wgsl")]),
            Kernel::Top => text(&[MATH, lanes, include_str!("kernels/top.wgsl")]),
            Kernel::Store { .. } => {
                let mut parts: Vec<_> = text(&[MATH, BYTES, LEVELS, TURN, STORE_ROWS]);
                parts.push(of_side(STORE_SIDE, ""));
                parts.push(include_str!("kernels/store.wgsl").into());
                parts
            }
            Kernel::StoreBoth { .. } => {
                let mut parts: Vec<_> = text(&[MATH, BYTES, LEVELS, TURN, ROTATION, STORE_ROWS]);
                parts.extend(["k_", "v_"].map(|name| of_side(STORE_SIDE, name)));
                parts.push(include_str!("kernels/store_both.wgsl").into());
                parts
            }
            Kernel::Copy { .. } => text(&[include_str!("kernels/copy.wgsl")]),
            Kernel::Attend { k, dim, recent, .. } => {
                let mut parts: Vec<_> =
                    text(&[MATH, element, BYTES, LEVELS, TURN, SINKS, lanes, ATTEND_PLAN]);
                parts.extend(["k_", "v_"].map(|name| of_side(CELLS, name)));
                parts.push(match self.attends_fast(k, dim, recent) {
                    true => include_str!("kernels/attend_fast.wgsl").into(),
                    false => include_str!("kernels/attend.wgsl").into(),
                });
                parts
            }
            Kernel::Merge { .. } => text(&[MATH, TURN, SINKS, include_str!("kernels/merge.wgsl")]),
            Kernel::Scatter => text(&[include_str!("kernels/scatter.wgsl")]),
            Kernel::Gather => text(&[include_str!("kernels/gather.wgsl")]),
        }
    }

    /// Constants of the fast kernels alone.
    fn own_constants(&self, kernel: &Kernel) -> Vec<(&'static str, Constant)> {
        // 16 bytes of weights or codes, and of encodings with fewer than eight bits 32 elements.
        let quads = |encoding: u32| match Encoding::RESIDENT.get(encoding as usize) {
            Some(Encoding::F32) => 1,
            Some(Encoding::F16 | Encoding::BF16) => 2,
            Some(Encoding::Q8_0 | Encoding::Int8) => 4,
            _ => 8,
        };
        match *kernel {
            Kernel::Matmul { encoding, .. } if self.fast => {
                vec![
                    ("UNIT_QUADS", quads(encoding).into()),
                    ("ROWS", ROWS_OF_LANE.into()),
                    ("NORMED", false.into()),
                ]
            }
            Kernel::Several { encoding, .. } => {
                vec![("UNIT_QUADS", quads(encoding).into()), ("ROWS", ROWS_OF_LANE.into())]
            }
            Kernel::Gemm { encoding, tile, .. } if tile.halves => {
                let quads = quads(encoding);
                vec![
                    ("UNIT_QUADS", quads.into()),
                    ("TILE_OUTPUTS", tile.outputs.into()),
                    ("TILE_TOKENS", tile.tokens.into()),
                    // A step has 16 quads, or 8 chunks of eight inputs, and a workgroup 256 invocations.
                    ("UNITS_EACH", (tile.outputs * (16 / quads) / 256).into()),
                    ("CHUNKS_EACH", (tile.tokens * 8 / 256).into()),
                    ("OUTPUTS_EACH", 8.into()),
                    ("TOKENS_EACH", (tile.tokens * (tile.outputs / 8) / 256).into()),
                ]
            }
            Kernel::Attend { k, dim, rows, recent, .. } if self.attends_fast(k, dim, recent) => {
                // Recent rows are many instructions more: four rows for an invocation instead of eight.
                let groups = if recent { 1 } else { rows / 4 };
                let threads = ATTEND_CELLS * (rows / 4) / groups;
                let each = dim.div_ceil(2).div_ceil(threads);
                vec![
                    ("FOURS", (rows / 4).into()),
                    ("GROUPS", groups.into()),
                    ("CELLS", ATTEND_CELLS.into()),
                    ("PAIRS_EACH", each.into()), // pairs of elements of an invocation
                    ("PAIR_SUMS", (2 * each).into()),
                    ("SUMS", (2 * each * rows / 4).into()),
                    ("QUERIES_EACH", (rows * dim).div_ceil(threads).into()),
                ]
            }
            // Elements of a row of 2,048 for each of 256 invocations.
            Kernel::Norm { .. } => vec![("KEPT", 8.into())],
            _ => Vec::new(),
        }
    }

    /// The whole source: constants, shared functions, the kernel.
    pub fn source(&self, kernel: &Kernel) -> String {
        let mut source = String::new();
        let mut constants = kernel.constants();
        if let Kernel::Gemm { tile, .. } = *kernel
            && tile.halves
            && self.cooperative
        {
            source += "enable f16;\nenable wgpu_cooperative_matrix;\n";
        }
        constants
            .extend(self.own_constants(kernel).into_iter().map(|(name, value)| (name.to_string(), value)));
        source.extend(constants.iter().map(|(name, value)| constant(name, *value)));
        self.parts(kernel).iter().for_each(|part| unrolled(part, &constants, &mut source));
        source
    }
}

#[cfg(test)]
mod tests;
