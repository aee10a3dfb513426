//! WHAT a backend is: the trait behind which K and V bytes live, and all that is the same for every backend.
//!
//! It promises that every byte is reserved in a [`MemoryBudget`] before it is allocated, that fresh memory is
//! zeroed, and that a step in which any layer failed leaves the cache as it was. [`mod@reference`] is the scalar
//! backend that a reader believes at sight; [`conformance`] is the suite that any other must pass against it.
#![forbid(unsafe_code)]

mod budget;
mod channels;
pub mod conformance;
mod error;
mod layout;
mod ledger;
mod pools;
mod recent;
pub mod reference;
mod registry;
mod session;
mod storage;
mod tensor;

pub use budget::*;
pub use channels::ChannelOrder;
pub use error::{BackendError, StepError};
pub use layout::{BadLayout, LayerSpec, Layout};
pub use ledger::KvLedger;
pub use pools::*;
pub use recent::Recent;
pub use registry::{BuildError, Registry};
pub use session::{Layers, Runner, Session, SessionStep};
pub use storage::{DType, Storage};
pub use tensor::{Tensor, TensorMut};
