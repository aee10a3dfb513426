//! How K or V rows are stored, and their size in bytes.
use std::fmt;
use std::str::FromStr;

/// Storage dtype of one side (K or V).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    F16,
    BF16,
    /// 8-bit codes, symmetric: one f16 scale per group.
    Q8,
    /// 4-bit codes, affine: an f16 scale and an f16 minimum per group.
    Q4,
    /// 4-bit codes of a rotated row, with levels optimised for a normal distribution: one f16 scale per row.
    T4,
}

impl DType {
    pub const ALL: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::Q8, DType::Q4, DType::T4];

    pub fn is_quantised(self) -> bool {
        matches!(self, DType::Q8 | DType::Q4 | DType::T4)
    }
    /// Whether it has a scale per group of elements.
    pub fn has_groups(self) -> bool {
        matches!(self, DType::Q8 | DType::Q4)
    }
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::Q8 => "q8",
            DType::Q4 => "q4",
            DType::T4 => "t4",
        }
    }
}

/// Dtype, quantisation group and rotation of one side. Text form: `q4`, `q4-64`, `q8-rot`, `q4-64-rot`, `t4`, `t4-o`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Storage {
    pub dtype: DType,
    /// Elements along head_dim that share a scale: 32 or 64. The last group of a row may be shorter. Only q8 and q4
    /// use it.
    pub group: u32,
    /// Rotate rows by a Hadamard matrix (after RoPE), block-diagonal over the largest power-of-two factor of
    /// head_dim. The rotation spreads outliers over a group before quantisation; scores and outputs stay the same
    /// except for rounding. `T4` always rotates and ignores this flag.
    pub rotate: bool,
    /// Keep the strongest eighth of the channels in 8 bits, next to the 4-bit codes of the others. For keys in `T4`: a
    /// few channels of K are many times larger than the rest, in every token, and affect scores most. A
    /// [`ChannelOrder`](crate::ChannelOrder) tells the pools which channels these are.
    pub outliers: bool,
}

impl Storage {
    pub const F32: Storage = Storage::new(DType::F32);
    pub const F16: Storage = Storage::new(DType::F16);
    pub const BF16: Storage = Storage::new(DType::BF16);
    pub const Q8: Storage = Storage::new(DType::Q8);
    pub const Q4: Storage = Storage::new(DType::Q4);
    pub const T4: Storage = Storage::new(DType::T4);
    /// `t4-o`, for keys.
    pub const T4_O: Storage = Storage { outliers: true, ..Storage::T4 };

    /// The dtype with groups of 32, not rotated.
    pub const fn new(dtype: DType) -> Self {
        Storage { dtype, group: 32, rotate: false, outliers: false }
    }

    /// The same storage without outliers, for values: they have no channels that are large in every token.
    pub const fn for_values(self) -> Self {
        Storage { outliers: false, ..self }
    }

    /// Channels of a row that are kept in 8 bits: an eighth, rounded up so that rows are whole words. 0 for a row
    /// shorter than a word.
    pub fn n_outliers(self, head_dim: u32) -> u32 {
        if self.outliers { head_dim.div_ceil(8).next_multiple_of(8).min(head_dim / 4 * 4) } else { 0 }
    }

    /// Groups per row.
    pub fn n_groups(self, head_dim: u32) -> u32 {
        head_dim.div_ceil(self.group)
    }

    /// Bytes of one row (one cell, one KV head) of `head_dim` values, scales and minimums included.
    pub fn row_bytes(self, head_dim: u32) -> u64 {
        let d = u64::from(head_dim);
        let groups = u64::from(self.n_groups(head_dim));
        match self.dtype {
            DType::F32 => 4 * d,
            DType::F16 | DType::BF16 => 2 * d,
            DType::Q8 => d + 2 * groups,
            DType::Q4 => d.div_ceil(2) + 4 * groups,
            DType::T4 => {
                let outliers = u64::from(self.n_outliers(head_dim));
                let scales = if outliers > 0 { 2 } else { 1 };
                outliers + (d - outliers).div_ceil(2) + 2 * scales
            }
        }
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dtype.name())?;
        if self.dtype.has_groups() && self.group != 32 {
            write!(f, "-{}", self.group)?;
        }
        f.write_str(if self.outliers { "-o" } else { "" })?;
        f.write_str(if self.rotate { "-rot" } else { "" })
    }
}

impl FromStr for Storage {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!(
                "`{text}` is not a KV dtype: use f32, f16, bf16, q8, q4 or t4; q8 and q4 with groups of 64 are q8-64 and q4-64; -rot at the end adds the rotation, which t4 has already; t4-o keeps the strongest channels of K in 8 bits"
            )
        };
        let mut parts = text.split('-');
        let name = parts.next().unwrap_or_default();
        let dtype = DType::ALL.into_iter().find(|d| d.name() == name).ok_or_else(refuse)?;
        let mut storage = Storage::new(dtype);
        for part in parts {
            match part {
                "32" | "64" if dtype.has_groups() && !storage.rotate => {
                    storage.group = if part == "64" { 64 } else { 32 }
                }
                "rot" if !storage.rotate && dtype != DType::T4 => storage.rotate = true,
                "o" if !storage.outliers && dtype == DType::T4 => storage.outliers = true,
                _ => return Err(refuse()),
            }
        }
        Ok(storage)
    }
}
