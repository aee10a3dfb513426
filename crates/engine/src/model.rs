//! A model that runs: weights loaded once, any number of sessions beside each other.
mod decoder;
mod layout;
mod load;
mod rope;
mod top;

pub use decoder::{Activations, Batch, Decoder};
pub use load::{LoadOptions, Model, ModelFile};
pub(crate) use load::{Opened, resident_bytes};
pub use top::top_two;
