//! How rows of K or V lie on the device.
//!
//! A row is what the host exports (docs/device.md), padded to whole words: codes, then scales. Float rows have no scales.
use kvist_device::{DType, DeviceError, Storage, bf16, f16, rotation};

/// A storage as kernels are compiled for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// 0 f32, 1 f16, 2 bf16, 3 q8, 4 q4, 5 t4.
    pub dtype: u32,
    /// Elements that share a scale in q8 and q4.
    pub group: u32,
    /// 0: not rotated; 1: rotated in blocks; 2: rotated as a whole, behind the first `wide` elements.
    pub turn: u32,
    /// Elements of a row that t4-o stores in a byte each.
    pub wide: u32,
}

impl Form {
    /// The form of a storage of rows of `dim` elements.
    ///
    /// # Errors
    /// There are no kernels for it.
    pub fn new(storage: Storage, dim: u32) -> Result<Self, DeviceError> {
        if storage.dtype.has_groups() && ![32, 64].contains(&storage.group) {
            let what = format!("groups of {} elements in {storage}; there are 32 and 64", storage.group);
            return Err(DeviceError::Unsupported(what));
        }
        if storage.outliers && storage.dtype != DType::T4 {
            let what = format!("outliers in {storage}: they are for keys in t4");
            return Err(DeviceError::Unsupported(what));
        }
        let (dtype, turn) = match storage.dtype {
            DType::F32 => (0, u32::from(storage.rotate)),
            DType::F16 => (1, u32::from(storage.rotate)),
            DType::BF16 => (2, u32::from(storage.rotate)),
            DType::Q8 => (3, u32::from(storage.rotate)),
            DType::Q4 => (4, u32::from(storage.rotate)),
            DType::T4 => (5, 2),
        };
        let group = if storage.dtype.has_groups() { storage.group } else { 32 };
        Ok(Form { dtype, group, turn, wide: storage.n_outliers(dim) })
    }

    pub fn is_packed(self) -> bool {
        self.dtype >= 3
    }

    /// Bytes of a row's codes.
    pub fn code_bytes(self, dim: u32) -> u32 {
        match self.dtype {
            0 => 4 * dim,
            1 | 2 => 2 * dim,
            3 => dim,
            4 => dim.div_ceil(2),
            _ => self.wide + (dim - self.wide).div_ceil(2),
        }
    }

    /// Scales and minimums of a row, two bytes each.
    pub fn scales(self, dim: u32) -> u32 {
        match self.dtype {
            0..=2 => 0,
            3 => dim.div_ceil(self.group),
            4 => 2 * dim.div_ceil(self.group),
            _ => 1 + u32::from(self.wide > 0),
        }
    }

    /// Words of a row.
    pub fn words(self, dim: u32) -> u32 {
        (self.code_bytes(dim) + 2 * self.scales(dim)).div_ceil(4)
    }

    /// The constants that kernels are compiled with, for rows of `dim` elements.
    pub fn constants(self, dim: u32) -> [(&'static str, u32); 7] {
        [
            ("DTYPE", self.dtype),
            ("GROUP", self.group),
            ("TURN", self.turn),
            ("WIDE", self.wide),
            ("CODES", self.code_bytes(dim)),
            ("SCALES", self.scales(dim)),
            ("WORDS", self.words(dim)),
        ]
    }

    /// Whether attention needs queries as they came beside those that are reordered and rotated like these keys.
    pub fn needs_plain_queries(self, recent: bool) -> bool {
        recent && self.is_packed() && self.turn > 0
    }

    /// The elements of a row as they were before they were stored, but for rounding. `order` has the channels in stored
    /// order, if rows are reordered.
    pub fn decode(self, row: &[u8], order: Option<&[u32]>, out: &mut [f32]) {
        let dim = out.len() as u32;
        let scales = &row[self.code_bytes(dim) as usize..];
        let scale = |i: usize| f16::from_le_bytes([scales[2 * i], scales[2 * i + 1]]).to_f32();
        let (group, wide) = (self.group as usize, self.wide as usize);
        let words = row.as_chunks::<4>().0;
        let halves = row.as_chunks::<2>().0;
        for i in 0..out.len() {
            out[i] = match self.dtype {
                0 => f32::from_le_bytes(words[i]),
                1 => f16::from_le_bytes(halves[i]).to_f32(),
                2 => bf16::from_le_bytes(halves[i]).to_f32(),
                3 => (f32::from(row[i]) - 128.0) * scale(i / group),
                4 => {
                    let g = i / group;
                    let len = group.min(out.len() - g * group);
                    let code = nibble(&row[g * group / 2..], len, i - g * group);
                    scale(2 * g + 1) + scale(2 * g) * f32::from(code)
                }
                _ if i < wide => (f32::from(row[i]) - 128.0) * scale(0),
                _ => {
                    let code = nibble(&row[wide..], out.len() - wide, i - wide);
                    scale(usize::from(wide > 0)) * LEVELS[usize::from(code)]
                }
            };
        }
        match self.turn {
            1 => rotation::rotate(out),
            2 => rotation::rotate_whole_back(&mut out[wide..]),
            _ => {}
        }
        if let Some(order) = order {
            let stored = out.to_vec();
            order.iter().zip(stored).for_each(|(channel, x)| out[*channel as usize] = x);
        }
    }
}

/// The levels of t4, as in `levels.wgsl`.
const LEVELS: [f32; 16] =
    [-127.0, -96.0, -75.0, -58.0, -44.0, -31.0, -18.0, -6.0, 6.0, 18.0, 31.0, 44.0, 58.0, 75.0, 96.0, 127.0];

/// Code `j` of a group of `len`, whose halves share bytes.
fn nibble(bytes: &[u8], len: usize, j: usize) -> u8 {
    let low = len.div_ceil(2);
    if j < low { bytes[j] & 15 } else { bytes[j - low] >> 4 }
}
