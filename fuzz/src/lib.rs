//! Fuzz targets live in `tests/`.
