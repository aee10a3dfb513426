//! Bytes on the CPU.
