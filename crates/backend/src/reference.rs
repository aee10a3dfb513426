//! Scalar attention that a reader believes at sight.
