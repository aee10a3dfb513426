//! How a tensor's elements are encoded, on disk and in memory.
use candle_core::quantized::GgmlDType;
use kvist_cpu::linear::Packing;
use std::fmt;
use std::str::FromStr;

/// The encodings kvist reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4K,
    Q6K,
}

impl Encoding {
    pub const ALL: [Encoding; 7] = [
        Encoding::F32,
        Encoding::F16,
        Encoding::BF16,
        Encoding::Q8_0,
        Encoding::Q4_0,
        Encoding::Q4K,
        Encoding::Q6K,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Encoding::F32 => "f32",
            Encoding::F16 => "f16",
            Encoding::BF16 => "bf16",
            Encoding::Q8_0 => "q8_0",
            Encoding::Q4_0 => "q4_0",
            Encoding::Q4K => "q4_K",
            Encoding::Q6K => "q6_K",
        }
    }
    /// `f32, f16, …`, for errors.
    pub fn known() -> String {
        Encoding::ALL.map(Encoding::name).join(", ")
    }
    pub fn is_float(self) -> bool {
        matches!(self, Encoding::F32 | Encoding::F16 | Encoding::BF16)
    }
    /// Elements and bytes of one block; rows are whole blocks.
    pub fn block(self) -> (usize, usize) {
        match self {
            Encoding::F32 => (1, 4),
            Encoding::F16 | Encoding::BF16 => (1, 2),
            Encoding::Q8_0 => (32, 34),
            Encoding::Q4_0 => (32, 18),
            Encoding::Q4K => (256, 144),
            Encoding::Q6K => (256, 210),
        }
    }
    /// Bytes of a row of `len` elements; `None` if it is not whole blocks, or overflows.
    pub fn row_bytes(self, len: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        len.is_multiple_of(elements).then_some(len / elements)?.checked_mul(bytes)
    }
    /// Bytes of a tensor; `None` if its rows are not whole blocks, or it overflows.
    pub fn tensor_bytes(self, shape: &[usize]) -> Option<usize> {
        let (last, rows) = shape.split_last()?;
        rows.iter().try_fold(self.row_bytes(*last)?, |bytes, n| bytes.checked_mul(*n))
    }
    pub(crate) fn packing(self) -> Packing {
        match self {
            Encoding::F32 => Packing::F32,
            Encoding::F16 => Packing::F16,
            Encoding::BF16 => Packing::BF16,
            Encoding::Q8_0 => Packing::Q8_0,
            Encoding::Q4_0 => Packing::Q4_0,
            Encoding::Q4K => Packing::Q4K,
            Encoding::Q6K => Packing::Q6K,
        }
    }
    pub(crate) fn candle(self) -> GgmlDType {
        match self {
            Encoding::F32 => GgmlDType::F32,
            Encoding::F16 => GgmlDType::F16,
            Encoding::BF16 => GgmlDType::BF16,
            Encoding::Q8_0 => GgmlDType::Q8_0,
            Encoding::Q4_0 => GgmlDType::Q4_0,
            Encoding::Q4K => GgmlDType::Q4K,
            Encoding::Q6K => GgmlDType::Q6K,
        }
    }
    /// What a tensor with rows of `row` elements becomes in memory under `form`.
    pub fn resident(self, form: WeightForm, row: usize) -> Encoding {
        match form {
            WeightForm::F32 => Encoding::F32,
            // bf16 is held in pairs.
            WeightForm::AsStored if self == Encoding::BF16 && !row.is_multiple_of(2) => Encoding::F32,
            WeightForm::AsStored => self,
            // Rows that are no whole blocks stay what they would be without it.
            WeightForm::Q8_0 if row.is_multiple_of(32) => Encoding::Q8_0,
            WeightForm::Q8_0 => self.resident(WeightForm::AsStored, row),
        }
    }
}

/// How linear layers are held in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightForm {
    /// Every tensor in the encoding of its file.
    #[default]
    AsStored,
    F32,
    /// 8.5 bits per weight, whatever the file holds.
    Q8_0,
}

impl fmt::Display for WeightForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightForm::AsStored => "as-stored",
            WeightForm::F32 => "f32",
            WeightForm::Q8_0 => "q8_0",
        })
    }
}

impl FromStr for WeightForm {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let all = [WeightForm::AsStored, WeightForm::F32, WeightForm::Q8_0];
        let found = all.into_iter().find(|form| form.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is no form of weights: take as-stored, f32 or q8_0"))
    }
}
