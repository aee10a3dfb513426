//! The encodings of tensor elements, in files and in memory.
use std::fmt;
use std::str::FromStr;

/// The encodings kvist reads: safetensors' floats and ggml's types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    F32,
    F16,
    BF16,
    F64,
    Q8_0,
    Q8_1,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
    Iq1S,
    Iq1M,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq4Nl,
    Iq4Xs,
    Tq1_0,
    Tq2_0,
    Mxfp4,
    Nvfp4,
    Q1_0,
    /// Not in files: at most 16 values, small integer scales and one float per 256 weights. ggml's rare encodings
    /// become this one without loss.
    Table16,
    /// Signed bytes with one f32 scale per row, as `compressed-tensors` stores W8A8 checkpoints. Its blocks are not those
    /// of a file: 32 codes behind the scale of their row, which every block of the row repeats.
    Int8,
}

struct Facts {
    encoding: Encoding,
    name: &'static str,
    /// ggml's type number; `None` for encodings that no file has.
    ggml: Option<u32>,
    /// Elements and bytes per block.
    block: (usize, usize),
    /// The encoding that it becomes without loss, because devices have kernels for that one.
    exact: Encoding,
}

const fn facts(
    encoding: Encoding,
    name: &'static str,
    ggml: u32,
    block: (usize, usize),
    exact: Encoding,
) -> Facts {
    Facts { encoding, name, ggml: Some(ggml), block, exact }
}

/// In the order of the enum's variants.
#[rustfmt::skip]
const FACTS: [Facts; 32] = [
    facts(Encoding::F32, "f32", 0, (1, 4), Encoding::F32),
    facts(Encoding::F16, "f16", 1, (1, 2), Encoding::F16),
    facts(Encoding::BF16, "bf16", 30, (1, 2), Encoding::BF16),
    facts(Encoding::F64, "f64", 28, (1, 8), Encoding::F32),
    facts(Encoding::Q8_0, "q8_0", 8, (32, 34), Encoding::Q8_0),
    facts(Encoding::Q8_1, "q8_1", 9, (32, 36), Encoding::Q8_0),
    facts(Encoding::Q4_0, "q4_0", 2, (32, 18), Encoding::Q4_0),
    facts(Encoding::Q4_1, "q4_1", 3, (32, 20), Encoding::Q4_1),
    facts(Encoding::Q5_0, "q5_0", 6, (32, 22), Encoding::Q5_0),
    facts(Encoding::Q5_1, "q5_1", 7, (32, 24), Encoding::Q5_1),
    facts(Encoding::Q2K, "q2_K", 10, (256, 84), Encoding::Q2K),
    facts(Encoding::Q3K, "q3_K", 11, (256, 110), Encoding::Q3K),
    facts(Encoding::Q4K, "q4_K", 12, (256, 144), Encoding::Q4K),
    facts(Encoding::Q5K, "q5_K", 13, (256, 176), Encoding::Q5K),
    facts(Encoding::Q6K, "q6_K", 14, (256, 210), Encoding::Q6K),
    facts(Encoding::Q8K, "q8_K", 15, (256, 292), Encoding::F32),
    facts(Encoding::Iq1S, "iq1_s", 19, (256, 50), Encoding::Table16),
    facts(Encoding::Iq1M, "iq1_m", 29, (256, 56), Encoding::Table16),
    facts(Encoding::Iq2Xxs, "iq2_xxs", 16, (256, 66), Encoding::Table16),
    facts(Encoding::Iq2Xs, "iq2_xs", 17, (256, 74), Encoding::Table16),
    facts(Encoding::Iq2S, "iq2_s", 22, (256, 82), Encoding::Table16),
    facts(Encoding::Iq3Xxs, "iq3_xxs", 18, (256, 98), Encoding::Table16),
    facts(Encoding::Iq3S, "iq3_s", 21, (256, 110), Encoding::Table16),
    facts(Encoding::Iq4Nl, "iq4_nl", 20, (32, 18), Encoding::Iq4Nl),
    facts(Encoding::Iq4Xs, "iq4_xs", 23, (256, 136), Encoding::Iq4Xs),
    facts(Encoding::Tq1_0, "tq1_0", 34, (256, 54), Encoding::Table16),
    facts(Encoding::Tq2_0, "tq2_0", 35, (256, 66), Encoding::Table16),
    facts(Encoding::Mxfp4, "mxfp4", 39, (32, 17), Encoding::Mxfp4),
    facts(Encoding::Nvfp4, "nvfp4", 40, (64, 36), Encoding::BF16),
    facts(Encoding::Q1_0, "q1_0", 41, (128, 18), Encoding::Q4_0),
    Facts { encoding: Encoding::Table16, name: "few", ggml: None, block: (256, 164), exact: Encoding::Table16 },
    Facts { encoding: Encoding::Int8, name: "int8", ggml: None, block: (32, 36), exact: Encoding::Int8 },
];

impl Encoding {
    /// The encodings that devices have kernels for, in the order in which kernels number them. The others become one of
    /// these without loss ([`exact`](Self::exact)).
    pub const RESIDENT: [Encoding; 18] = [
        Encoding::F32,
        Encoding::F16,
        Encoding::BF16,
        Encoding::Q8_0,
        Encoding::Q4_0,
        Encoding::Q4_1,
        Encoding::Q5_0,
        Encoding::Q5_1,
        Encoding::Iq4Nl,
        Encoding::Mxfp4,
        Encoding::Q2K,
        Encoding::Q3K,
        Encoding::Q4K,
        Encoding::Q5K,
        Encoding::Q6K,
        Encoding::Iq4Xs,
        Encoding::Table16,
        Encoding::Int8,
    ];

    fn facts(self) -> &'static Facts {
        &FACTS[self as usize]
    }
    /// ggml's encodings and floats.
    pub fn all() -> impl Iterator<Item = Encoding> {
        FACTS.iter().filter(|facts| facts.ggml.is_some()).map(|facts| facts.encoding)
    }
    /// The encoding with this type number in GGUF files.
    pub fn of_ggml(number: u32) -> Option<Encoding> {
        FACTS.iter().find(|facts| facts.ggml == Some(number)).map(|facts| facts.encoding)
    }
    pub fn name(self) -> &'static str {
        self.facts().name
    }
    /// `f32, f16, …`, for errors.
    pub fn known() -> String {
        Self::all().map(Encoding::name).collect::<Vec<_>>().join(", ")
    }
    pub fn is_float(self) -> bool {
        self.block().0 == 1
    }
    /// Elements and bytes per block. Rows consist of whole blocks.
    pub fn block(self) -> (usize, usize) {
        self.facts().block
    }
    /// Bytes of a row of `len` elements. `None` if that is not a whole number of blocks, or on overflow.
    pub fn row_bytes(self, len: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        len.is_multiple_of(elements).then_some(len / elements)?.checked_mul(bytes)
    }
    /// Bytes of a tensor. `None` if its rows are not whole blocks, or on overflow.
    pub fn tensor_bytes(self, shape: &[usize]) -> Option<usize> {
        let (last, rows) = shape.split_last()?;
        rows.iter().try_fold(self.row_bytes(*last)?, |bytes, n| bytes.checked_mul(*n))
    }
    /// Bytes of a tensor in a file: as [`tensor_bytes`](Self::tensor_bytes), but int8 has a scale per row, of two bytes here.
    pub fn stored_bytes(self, shape: &[usize]) -> Option<usize> {
        match (self, shape.split_last()) {
            (Encoding::Int8, Some((last, rows))) => {
                rows.iter().try_fold(last.checked_add(2)?, |bytes, n| bytes.checked_mul(*n))
            }
            _ => self.tensor_bytes(shape),
        }
    }
    /// The encoding that it becomes without loss, because devices have kernels for that one. Itself, if it has kernels.
    pub fn exact(self) -> Encoding {
        self.facts().exact
    }
    /// The encoding that a device keeps in memory, under `format`, of a tensor with rows of `row` elements.
    pub fn resident(self, format: WeightFormat, row: usize) -> Encoding {
        match format {
            WeightFormat::F32 => Encoding::F32,
            WeightFormat::AsStored => self.exact(),
            // Rows that are not whole blocks stay as stored.
            WeightFormat::Q8_0 if row.is_multiple_of(32) => Encoding::Q8_0,
            WeightFormat::Int8 if row.is_multiple_of(32) => Encoding::Int8,
            WeightFormat::Q8_0 | WeightFormat::Int8 => self.exact(),
        }
    }
}

/// How linear layers are kept in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// Every tensor in its file's encoding.
    #[default]
    AsStored,
    F32,
    /// 8.5 bits per weight, whatever the file's encoding: a scale per 32 weights.
    Q8_0,
    /// 8 bits per weight, whatever the file's encoding: a scale per row.
    Int8,
}

impl WeightFormat {
    pub const ALL: [WeightFormat; 4] =
        [WeightFormat::AsStored, WeightFormat::F32, WeightFormat::Q8_0, WeightFormat::Int8];
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightFormat::AsStored => "as-stored",
            WeightFormat::F32 => "f32",
            WeightFormat::Q8_0 => "q8_0",
            WeightFormat::Int8 => "int8",
        })
    }
}

impl FromStr for WeightFormat {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|format| format.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is not a weight format: use as-stored, f32, q8_0 or int8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_stand_in_the_order_of_the_enum() {
        for (i, facts) in FACTS.iter().enumerate() {
            assert_eq!(facts.encoding as usize, i);
            let found = facts.ggml.and_then(Encoding::of_ggml);
            assert_eq!(found, facts.ggml.map(|_| facts.encoding));
            assert_eq!(facts.exact.exact(), facts.exact, "{}", facts.name);
            assert!(facts.block.0.is_multiple_of(facts.exact.block().0), "{}", facts.name);
            let is_exact = facts.exact == facts.encoding;
            assert_eq!(Encoding::RESIDENT.contains(&facts.encoding), is_exact, "{}", facts.name);
        }
    }
}
