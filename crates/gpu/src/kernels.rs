//! The kernels: the constants each is compiled with, and the buffers it writes.
//!
//! Sizes that decide about registers and shared memory are constants; all others are immediates.
use crate::driver::Limits;
use crate::form::Form;
use kvist_device::weights::Encoding;

/// A kernel with its constants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    Embed {
        encoding: u32,
    },
    Matmul {
        encoding: u32,
        tokens: u32,
        routed: Routed,
    },
    /// [`Kernel::Matmul`] for one token and up to three layers with the same inputs and encoding. `gated`: for two, whose results become
    /// `activation(first, second)`. `normed`: the inputs are normed before, as by [`Kernel::Norm`]. `routed`, if gated and not normed: for
    /// each routed row its expert's two layers.
    Several {
        encoding: u32,
        gated: bool,
        normed: bool,
        routed: bool,
    },
    /// [`Kernel::Matmul`] for many tokens, with the same bits where results do not depend on the batch.
    Gemm {
        encoding: u32,
        routed: Routed,
        tile: GemmTile,
    },
    /// Rows of inputs as [`GemmTile::halves`] wants them.
    Halves,
    Norm {
        in_place: bool,
    },
    Rope,
    Gated,
    Add,
    Rows(RowsOp),
    /// Which experts each token uses: its routed rows, one behind the other.
    Route,
    /// Those rows in order of expert, for [`Kernel::Gemm`].
    Sort,
    /// Weighs and adds the outputs of each token's experts.
    Combine,
    Top,
    /// Writes rows of `dim` elements, and their recent rows if `recent` says so.
    Store {
        form: Form,
        dim: u32,
        recent: RecentForm,
    },
    /// [`Kernel::Rope`] for queries and keys, if they are rotated, and [`Kernel::Store`] for keys and values, in one launch with the
    /// same bits. `recent`: packed sides have recent rows.
    StoreBoth {
        k: Form,
        v: Form,
        dim: u32,
        recent: bool,
    },
    Copy {
        within: bool,
    },
    /// `rows`: query rows of a workgroup, one of [`ATTEND_ROWS`]. `recent`: packed sides have recent rows.
    Attend {
        k: Form,
        v: Form,
        dim: u32,
        rows: u32,
        recent: bool,
    },
    Merge {
        v: Form,
        dim: u32,
    },
    /// Rows of blocks to their cells.
    Scatter,
    /// Rows of cells to blocks.
    Gather,
}

/// What a recent row has of the row that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecentForm {
    /// There is none.
    No,
    /// The row before it is reordered and rotated: keys.
    Plain,
    /// The row after that: values.
    Turned,
}

/// Which layer [`Kernel::Matmul`] and [`Kernel::Gemm`] compute, and what becomes of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Routed {
    /// One layer for all tokens.
    No,
    /// The same, and adds the result to what is there: to the residual stream.
    Sum,
    /// That of each routed row's expert, see `routes.wgsl`.
    Experts,
}

/// What a workgroup of [`Kernel::Gemm`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmTile {
    pub outputs: u32,
    pub tokens: u32,
    /// Its inputs are rows of [`Kernel::Halves`], and its sums may be those of tensor cores.
    pub halves: bool,
}

impl GemmTile {
    /// The kernel that every driver has.
    pub const USUAL: GemmTile = GemmTile { outputs: GEMM_TILE, tokens: GEMM_TILE, halves: false };
}

/// Bytes of `rows` rows of [`Kernel::Halves`]: numbers, and then 16 bytes for each row.
pub fn halves_bytes(rows: usize, inputs: usize) -> Option<u64> {
    let row = inputs.checked_next_multiple_of(256)?.checked_mul(2)?.checked_add(16)?;
    u64::try_from(rows.checked_mul(row)?).ok()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowsOp {
    Copy,
    Gather,
    Zero,
}

/// Workgroups that a dispatch has in a dimension.
pub const MAX_GROUPS: u32 = 65_535;
/// Query rows that a workgroup of [`Kernel::Attend`] can have.
pub const ATTEND_ROWS: [u32; 3] = [8, 16, 32];
/// Words of an entry of a plan's tables.
pub const ENTRY_WORDS: u32 = 9;
/// Lanes that share a sum of [`Kernel::Matmul`] and [`Kernel::Gemm`].
pub const SUM_LANES: u32 = 16;
/// Output rows of a workgroup of [`Kernel::Matmul`].
pub const MATMUL_OUTPUTS: u32 = 8;
/// Output rows, and tokens, of a workgroup of [`Kernel::Gemm`].
pub const GEMM_TILE: u32 = 32;
/// Workgroups of [`Kernel::Norm`] in x; further ones follow in y.
pub const NORM_ROWS: u32 = 32_768;

/// The value of a constant that a kernel is compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Constant {
    Flag(bool),
    Number(u32),
}

impl From<bool> for Constant {
    fn from(is: bool) -> Self {
        Constant::Flag(is)
    }
}
impl From<u32> for Constant {
    fn from(n: u32) -> Self {
        Constant::Number(n)
    }
}

/// The number of an encoding in the kernels. `None` if there is no kernel for it.
pub fn encoding_number(encoding: Encoding) -> Option<u32> {
    Encoding::RESIDENT.iter().position(|known| *known == encoding).map(|number| number as u32)
}

/// Bytes of workgroup memory of [`Kernel::Attend`].
pub fn attend_workgroup_bytes(k: Form, dim: u32, rows: u32, recent: bool) -> u64 {
    const CELLS: u64 = 32;
    let (rows, dim) = (u64::from(rows), u64::from(dim));
    let plain = if k.needs_plain_queries(recent) { rows } else { 1 };
    // Queries; scores; largest scores; the cells' entries; which rows read recent rows; five words of state per row.
    4 * ((rows + plain) * dim + rows * CELLS + rows * 8 + 3 * CELLS + rows / 4 * CELLS + 5 * rows)
}

/// Output rows and tokens of a workgroup of [`Kernel::Matmul`] or [`Kernel::Gemm`], unless a driver has others.
pub fn product_tile(kernel: &Kernel) -> (u32, u32) {
    match kernel {
        Kernel::Matmul { tokens, .. } => (MATMUL_OUTPUTS, *tokens),
        Kernel::Several { .. } => (MATMUL_OUTPUTS, 1),
        Kernel::Gemm { tile, .. } => (tile.outputs, tile.tokens),
        _ => (GEMM_TILE, GEMM_TILE),
    }
}

/// [`Driver::attend_rows`](crate::Driver::attend_rows), unless a driver has a kernel of its own.
pub fn attend_rows(limits: &Limits, wanted: u32, k: Form, dim: u32, recent: bool) -> u32 {
    let fits = |rows: u32| {
        rows <= limits.max_attend_rows
            && attend_workgroup_bytes(k, dim, rows, recent) <= u64::from(limits.max_workgroup_bytes)
    };
    let enough = ATTEND_ROWS.into_iter().find(|rows| *rows >= wanted).unwrap_or(u32::MAX);
    let most = ATTEND_ROWS.into_iter().rfind(|rows| *rows <= enough && fits(*rows));
    most.unwrap_or(ATTEND_ROWS[0])
}

impl Kernel {
    pub fn name(&self) -> &'static str {
        match self {
            Kernel::Embed { .. } => "embed",
            Kernel::Matmul { .. } => "matmul",
            Kernel::Several { .. } => "several",
            Kernel::Gemm { .. } => "gemm",
            Kernel::Halves => "halves",
            Kernel::Norm { .. } => "norm",
            Kernel::Rope => "rope",
            Kernel::Gated => "gated",
            Kernel::Add => "add",
            Kernel::Rows(_) => "rows",
            Kernel::Route => "route",
            Kernel::Sort => "sort",
            Kernel::Combine => "combine",
            Kernel::Top => "top",
            Kernel::Store { .. } => "store",
            Kernel::StoreBoth { .. } => "store_both",
            Kernel::Copy { .. } => "copy",
            Kernel::Attend { .. } => "attend",
            Kernel::Merge { .. } => "merge",
            Kernel::Scatter => "scatter",
            Kernel::Gather => "gather",
        }
    }

    /// The constants that the kernel is compiled with, by name.
    pub fn constants(&self) -> Vec<(String, Constant)> {
        let mut all = Vec::new();
        let mut add = |name: &str, value: Constant| all.push((name.to_string(), value));
        match *self {
            Kernel::Embed { encoding } => add("ENCODING", encoding.into()),
            Kernel::Matmul { encoding, tokens, .. } => {
                add("ENCODING", encoding.into());
                add("TOKENS", tokens.into());
                add("OUTPUTS", MATMUL_OUTPUTS.into());
            }
            Kernel::Several { encoding, gated, normed, routed } => {
                add("ENCODING", encoding.into());
                add("TOKENS", 1u32.into());
                add("GATED", gated.into());
                add("NORMED", normed.into());
                add("ROUTED", routed.into());
                add("TILED", false.into());
                add("ADDED", false.into());
                add("LANES", SUM_LANES.into());
            }
            Kernel::Gemm { encoding, tile, .. } => {
                add("ENCODING", encoding.into());
                add("TILE", tile.outputs.into());
            }
            Kernel::Norm { in_place } => {
                add("IN_PLACE", in_place.into());
                add("ROWS", NORM_ROWS.into());
            }
            Kernel::Rows(op) => {
                add("GATHER", (op == RowsOp::Gather).into());
                add("ZERO", (op == RowsOp::Zero).into());
            }
            Kernel::Store { form, dim, recent } => {
                add("DIM", dim.into());
                form.constants(dim).into_iter().for_each(|(name, n)| add(name, n.into()));
                add("RECENT", (recent != RecentForm::No).into());
                add("PLAIN_RECENT", (recent == RecentForm::Plain).into());
            }
            Kernel::StoreBoth { k, v, dim, recent } => {
                add("DIM", dim.into());
                k.constants(dim).into_iter().for_each(|(name, n)| add(&format!("K_{name}"), n.into()));
                v.constants(dim).into_iter().for_each(|(name, n)| add(&format!("V_{name}"), n.into()));
                add("K_RECENT", (recent && k.is_packed()).into());
                add("V_RECENT", (recent && v.is_packed()).into());
            }
            Kernel::Copy { within } => add("WITHIN", within.into()),
            Kernel::Attend { k, v, dim, rows, recent } => {
                add("DIM", dim.into());
                add("ROWS", rows.into());
                add("ENTRY", ENTRY_WORDS.into());
                k.constants(dim).into_iter().for_each(|(name, n)| add(&format!("K_{name}"), n.into()));
                v.constants(dim).into_iter().for_each(|(name, n)| add(&format!("V_{name}"), n.into()));
                add("K_RECENT", (recent && k.is_packed()).into());
                add("V_RECENT", (recent && v.is_packed()).into());
                add("PLAIN", k.needs_plain_queries(recent).into());
            }
            Kernel::Merge { v, dim } => {
                add("DIM", dim.into());
                add("PARTIAL_SLOTS", crate::tables::PARTIAL_SLOTS.into());
                v.constants(dim).into_iter().for_each(|(name, n)| add(&format!("V_{name}"), n.into()));
            }
            Kernel::Rope | Kernel::Gated | Kernel::Add | Kernel::Top => {}
            Kernel::Route | Kernel::Sort | Kernel::Combine => {}
            Kernel::Halves | Kernel::Scatter | Kernel::Gather => {}
        }
        if let Kernel::Matmul { routed, .. } | Kernel::Gemm { routed, .. } = *self {
            add("LANES", SUM_LANES.into());
            add("ROUTED", (routed == Routed::Experts).into());
            add("TILED", matches!(self, Kernel::Gemm { .. }).into());
            add("ADDED", (routed == Routed::Sum).into());
        }
        all
    }

    /// For every binding, whether the kernel writes it.
    pub fn writes(&self) -> &'static [bool] {
        match self {
            Kernel::Embed { .. } | Kernel::Top | Kernel::Combine => &[false, false, true],
            Kernel::Sort => &[true],
            Kernel::Store { .. } => &[false, false, false, true, true],
            Kernel::StoreBoth { .. } => &[false, true, true, false, false, false, true, true, true],
            Kernel::Matmul { .. } | Kernel::Gemm { .. } => &[false, false, false, true, false],
            Kernel::Several { .. } => {
                &[false, false, false, false, false, false, false, false, true, true, true]
            }
            Kernel::Norm { .. } | Kernel::Rows(_) => &[false, true, false],
            Kernel::Rope | Kernel::Gated | Kernel::Add | Kernel::Route | Kernel::Halves => &[false, true],
            Kernel::Copy { .. } => &[true, false],
            Kernel::Attend { .. } => &[false, false, false, false, false, true, true, false, false],
            Kernel::Merge { .. } => &[false, false, false, true],
            Kernel::Scatter | Kernel::Gather => &[false, false, true],
        }
    }
}
