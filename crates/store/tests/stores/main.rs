//! All stores: against their reference models, with damaged bytes, after crashes, and with servers that fail.
mod damage;
#[cfg(feature = "disk")]
mod disk;
#[cfg(any(feature = "disk", feature = "remote"))]
mod faults;
mod ram;
mod reference;
#[cfg(feature = "remote")]
mod remote;
