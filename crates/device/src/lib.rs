//! The interface of devices: the operations of a decoder, pools that store K and V and attend over them (backends), and
//! what all devices share.
//!
//! Every byte is reserved in a [`MemoryBudget`] before it is allocated, fresh memory is zeroed, and a step in which
//! any layer failed leaves the cache as it was. [`mod@reference`] is a simple scalar backend that serves as the
//! reference; `kvist_testing::conformance` is the test suite that every other backend must pass.
#![forbid(unsafe_code)]

mod budget;
mod caller_rows;
mod channels;
mod checks;
mod device;
mod error;
mod layout;
mod ledger;
mod mapped;
mod mass;
mod network;
mod pools;
mod recent;
pub mod reference;
mod registry;
pub mod rotation;
mod rows;
mod sampling;
mod session;
mod step_io;
mod storage;
mod tensor;
mod transfer;
pub mod weights;

pub use budget::*;
pub use caller_rows::{Rows, RowsMut, StridedShape};
pub use channels::ChannelOrder;
pub use device::*;
pub use error::{DeviceError, StepError};
/// The dtypes of a caller's rows, from the crate `half`.
pub use half::{bf16, f16};
pub use layout::{BadLayout, LayerSpec, LayerState, Layout, Values};
pub use ledger::KvLedger;
pub use mapped::{Image, MappedRows, MappedSide};
pub use mass::{AttentionMass, GroupMass, MassQueries};
pub use network::*;
pub use pools::*;
pub use recent::{CellPosition, Recent, RecentPlan, RecentRead, RecentReads};
pub use registry::{BuildError, Registry};
pub use rows::{DeviceRow, Draw, Drawn, RowOutput, RowResult, StepOutput, WantedRow};
pub use sampling::{HostSampler, NoToken, SampleParams, log_sum};
pub use session::{AttendRows, Session, SessionStep, compact, resize};
pub use step_io::*;
pub use storage::{DType, Storage};
pub use tensor::{Tensor, TensorMut};
pub use transfer::{
    ArenaUsage, FinishedTransfers, HostArena, HostBlock, LentMemory, Transfer, TransferRefused,
};

/// Compiles the example in docs/device.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/device.md")]
struct Guide;
