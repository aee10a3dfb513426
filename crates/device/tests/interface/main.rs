//! What every device shares: shapes, storages, budgets, steps and wanted rows; and the reference device.
mod bounds;
mod budget;
mod conformance;
mod reference;
mod rows;
mod session;
mod storage;
