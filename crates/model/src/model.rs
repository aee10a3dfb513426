//! A loaded model. Any number of sessions share its weights.
mod decoder;
mod draft;
mod head;
mod layout;
mod load;
mod size;
mod top;

pub use head::{DraftHead, OpenedHead};
use load::resident_bytes;
pub use load::{LoadOptions, Model, ModelFile, Opened};
pub use size::ModelSize;
pub use top::top_two;
