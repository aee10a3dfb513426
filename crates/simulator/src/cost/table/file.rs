//! The file format of a table.
use serde::{Deserialize, Serialize};

/// The file format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TableFile {
    pub format: String,
    pub version: u64,
    #[serde(default)]
    pub machine: String,
    #[serde(default)]
    pub model: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setting: Option<Setting>,
    #[serde(default)]
    pub shared_ns: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedAxes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafts: Option<DraftAxes>,
    pub prefill: PrefillAxes,
    pub decode: DecodeAxes,
}

impl TableFile {
    pub const FORMAT: &str = "kvist-step-cost";
    pub const VERSION: u64 = 1;
}

/// The settings of a measurement: the part of a server's configuration that affects step times.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Setting {
    /// The program that took the measurement.
    pub program: String,
    pub weights: String,
    /// Storage formats of K and V.
    pub k: String,
    pub v: String,
    pub block_tokens: u32,
    pub threads: usize,
    /// The instruction set of the kernels.
    pub isa: String,
    /// How often each cell was measured.
    pub rounds: u32,
    pub seconds: f64,
    /// Fraction of all CPU time that was busy. More than this program's threads means that other programs ran as well.
    pub busy: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillAxes {
    #[serde(alias = "sequences")]
    pub tokens: Vec<f64>,
    pub context: Vec<f64>,
    /// [tokens, context]
    pub ns: Vec<Vec<f64>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeAxes {
    #[serde(alias = "tokens")]
    pub sequences: Vec<f64>,
    pub context: Vec<f64>,
    /// [sequences, context]
    pub ns: Vec<Vec<f64>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharedAxes {
    pub tokens: Vec<f64>,
    pub sequences: Vec<f64>,
    /// [tokens, sequences]
    pub ns: Vec<Vec<f64>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DraftAxes {
    /// Tokens of one sequence in a step: the last known one and its drafts.
    pub rows: Vec<f64>,
    pub context: Vec<f64>,
    /// [rows, context]
    pub ns: Vec<Vec<f64>>,
}
