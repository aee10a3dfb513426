//! Which cell stores which token: every kind of cache, the prefix index, eviction, transfers and the arena.
mod stepping;

mod arena;
mod checked;
mod compact;
mod defects;
mod demote;
mod evict;
mod keep;
mod kept;
mod paged;
mod prefix;
mod properties;
mod reports;
mod shared;
mod shared_prefix;
mod states;
mod tables;
mod transfers;
