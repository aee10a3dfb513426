//! Steps of a cache, as C reads them.
mod ffi;
