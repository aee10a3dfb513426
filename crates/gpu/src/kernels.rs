//! The kernels: the constants each is compiled with, and the buffers it writes.
//!
//! Sizes that decide about registers and shared memory are constants; all others are immediates.
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
    /// [`Kernel::Matmul`] for many tokens, with the same bits.
    Gemm {
        encoding: u32,
        routed: Routed,
    },
    Norm {
        in_place: bool,
    },
    Rope,
    Gated,
    Add,
    Rows(RowsOp),
    Route,
    Top,
    /// Writes rows of `dim` elements, and their recent rows if `recent` says so.
    Store {
        form: Form,
        dim: u32,
        recent: RecentForm,
    },
    Copy {
        within: bool,
    },
    /// `recent`: packed sides have recent rows.
    Attend {
        k: Form,
        v: Form,
        dim: u32,
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

/// What [`Kernel::Matmul`] and [`Kernel::Gemm`] do with a token's route to an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Routed {
    /// Not a layer of an expert.
    No,
    /// Only tokens that use the expert.
    Only,
    /// And adds the weighted result.
    Added,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowsOp {
    Copy,
    Gather,
    Zero,
}

/// Query rows of a workgroup of [`Kernel::Attend`]; `ROWS` there.
pub const ATTEND_ROWS: u32 = 8;
/// Output rows of a workgroup of [`Kernel::Matmul`]; `OUTPUTS` there.
pub const MATMUL_OUTPUTS: u32 = 8;

/// Output rows, and tokens, of a workgroup of [`Kernel::Gemm`].
pub const GEMM_TILE: u32 = 32;

/// The number of an encoding in the kernels. `None` if there is no kernel for it.
pub fn encoding_number(encoding: Encoding) -> Option<u32> {
    Some(match encoding {
        Encoding::F32 => 0,
        Encoding::F16 => 1,
        Encoding::BF16 => 2,
        Encoding::Q8_0 => 3,
        Encoding::Q4_0 => 4,
        Encoding::Q4_1 => 5,
        Encoding::Q5_0 => 6,
        Encoding::Q5_1 => 7,
        Encoding::Iq4Nl => 8,
        Encoding::Mxfp4 => 9,
        Encoding::Q2K => 10,
        Encoding::Q3K => 11,
        Encoding::Q4K => 12,
        Encoding::Q5K => 13,
        Encoding::Q6K => 14,
        Encoding::Iq4Xs => 15,
        Encoding::Table16 => 16,
        _ => return None,
    })
}

/// Bytes of workgroup memory of [`Kernel::Attend`].
pub fn attend_workgroup_bytes(k: Form, dim: u32, recent: bool) -> u64 {
    let (rows, cells) = (u64::from(ATTEND_ROWS), 32);
    let queries = if k.needs_plain_queries(recent) { 2 } else { 1 };
    4 * (queries * rows * u64::from(dim) + rows * cells + 5 * cells + 5 * rows)
}

impl Kernel {
    pub fn name(&self) -> &'static str {
        match self {
            Kernel::Embed { .. } => "embed",
            Kernel::Matmul { .. } => "matmul",
            Kernel::Gemm { .. } => "gemm",
            Kernel::Norm { .. } => "norm",
            Kernel::Rope => "rope",
            Kernel::Gated => "gated",
            Kernel::Add => "add",
            Kernel::Rows(_) => "rows",
            Kernel::Route => "route",
            Kernel::Top => "top",
            Kernel::Store { .. } => "store",
            Kernel::Copy { .. } => "copy",
            Kernel::Attend { .. } => "attend",
            Kernel::Merge { .. } => "merge",
            Kernel::Scatter => "scatter",
            Kernel::Gather => "gather",
        }
    }

    /// For every binding, whether the kernel writes it.
    pub fn writes(&self) -> &'static [bool] {
        match self {
            Kernel::Embed { .. } | Kernel::Top => &[false, false, true],
            Kernel::Store { .. } => &[false, false, false, true, true],
            Kernel::Matmul { .. } | Kernel::Gemm { .. } => &[false, false, false, true, false],
            Kernel::Norm { .. } | Kernel::Rows(_) => &[false, true, false],
            Kernel::Rope | Kernel::Gated | Kernel::Add | Kernel::Route => &[false, true],
            Kernel::Copy { .. } => &[true, false],
            Kernel::Attend { .. } => &[false, false, false, false, false, true, true, false, false],
            Kernel::Merge { .. } => &[false, false, false, true],
            Kernel::Scatter | Kernel::Gather => &[false, false, true],
        }
    }
}
