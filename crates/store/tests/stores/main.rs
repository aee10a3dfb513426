//! All stores: against their reference models, with damaged bytes, after crashes, and with servers that fail.
mod damage;
mod disk;
mod faults;
mod ram;
mod reference;
mod remote;
